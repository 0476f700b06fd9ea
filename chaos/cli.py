"""``resilient-chaos``: break a running executor on purpose, and see whether it survives."""

from __future__ import annotations

import argparse
import importlib
import json
import random
import re
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from resilient_executor.chaos.faults import MIXTURE, TRAITS, Fault, Kind, Needs, Target, Timing, draw

PROGRAM: Final = "resilient-chaos"
EXIT_SURVIVED: Final = 0
EXIT_NOT_SURVIVED: Final = 1
EXIT_REFUSED: Final = 2
EXIT_INTERRUPTED: Final = 130

_EPILOG: Final = (
    "exit codes: 0 it survived (or the history is clean); 1 it did not; 2 refused, nothing was broken; 130 Ctrl-C, "
    "and what was stopped goes on"
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    options = _parser().parse_args(arguments)
    from resilient_executor.chaos.targets import ChaosError

    before = signal.signal(signal.SIGTERM, _interrupt)
    try:
        code: int = options.run(options)
        return code
    except ChaosError as error:
        print(f"{PROGRAM}: {error}", file=sys.stderr)
        return EXIT_REFUSED
    except KeyboardInterrupt:
        print(f"{PROGRAM}: interrupted; what was stopped goes on", file=sys.stderr)
        return EXIT_INTERRUPTED
    finally:
        signal.signal(signal.SIGTERM, before)


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=PROGRAM, description=__doc__, epilog=_EPILOG)
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    targets = commands.add_parser("targets", help="who could be hit: executors, and the workers of one")
    _add_executor(targets)
    targets.set_defaults(run=_run_targets)
    for kind, traits in TRAITS.items():
        where = " (inside a worker; needs allow_chaos)" if traits.needs is Needs.PERMISSION else ""
        one = commands.add_parser(kind.value, help=f"{traits.text}{where}", epilog=_EPILOG)
        _add_executor(one)
        _add_victim(one)
        one.add_argument("--duration", type=seconds, default=0.0, help="how long it lasts (2s, 1m); without: for ever")
        one.add_argument("--exit-code", type=int, default=3, help=argparse.SUPPRESS)
        one.set_defaults(run=_run_one, kind=kind)
    storm = commands.add_parser("storm", help="faults at random moments, drawn from a seed", epilog=_EPILOG)
    _add_executor(storm)
    storm.add_argument("--mtbf", type=seconds, default=20.0, help="mean time between failures")
    storm.add_argument("--duration", type=seconds, default=300.0, help="how long it lasts")
    storm.add_argument("--max-faults", type=int, default=50)
    storm.add_argument("--seed", type=int, default=None, help="without: one is drawn, and printed")
    storm.add_argument("--protect", action="append", default=[], metavar="rank:N", help="never hit; may be repeated")
    storm.add_argument("--kinds", default="", help="only these, separated by commas")
    storm.set_defaults(run=_run_storm)
    check = commands.add_parser("check", help="judge a recorded history", epilog=_EPILOG)
    check.add_argument("history", type=Path)
    check.add_argument("--json", action="store_true")
    check.set_defaults(run=_run_check)
    report = commands.add_parser("report", help="make a page of a recorded history")
    report.add_argument("history", type=Path)
    report.add_argument("--output", type=Path, default=None, help="the page; the data goes beside it as .json")
    report.set_defaults(run=_run_report)
    try:  # the harness of several nodes on one machine
        harness = importlib.import_module("resilient_executor.chaos.cluster")
    except ModuleNotFoundError:
        return parser
    harness.add_commands(commands)
    return parser


def _add_executor(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--address", default="auto", help="of the Ray cluster")
    parser.add_argument("--namespace", default="resilient-executor", help="the executor's Ray namespace")
    parser.add_argument("--name", default="executor", help="the executor's name (setting name)")
    parser.add_argument("--dry-run", action="store_true", help="name the victims and break nothing")
    parser.add_argument("--within", type=seconds, default=120.0, help="it must be steady again within this")
    parser.add_argument("--json", type=Path, default=None, help="write what was done and what came of it")


def _add_victim(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rank", type=int)
    parser.add_argument("--stage", type=int)
    parser.add_argument("--node", help="address of a node")
    parser.add_argument("--count", type=int, default=1, help="so many at once")
    parser.add_argument("--phase", default="", help="only when a rebuild is in this phase")
    parser.add_argument("--seed", type=int, default=None, help="decides what is left to chance")


@contextmanager
def controller(options: argparse.Namespace) -> Iterator[Any]:
    """A controller of the executor that the options name; what it has stopped goes on at the end.

    Raises:
        NotFound: there is no such cluster or executor.
    """
    import ray

    from resilient_executor.chaos.control import Controller
    from resilient_executor.chaos.targets import connect, look

    here = connect(options.address, options.namespace)
    control = None
    try:
        control = Controller(lambda: look(options.name, options.namespace))
        yield control
    finally:
        if control is not None:
            control.close()
        if here:
            ray.shutdown()


def _run_targets(options: argparse.Namespace) -> int:
    from resilient_executor.chaos.targets import executors

    with controller(options) as control:
        for namespace, name in executors():
            print(f"executor {name} in namespace {namespace}")
        roster = control.roster()
        print(f"{roster.name}: epoch {roster.epoch}, {roster.state}")
        for member in roster.members:
            inside = "" if not hasattr(member.handle, "inject") else "; chaos allowed"
            print(f"  rank {member.rank}, stage {member.stage}: pid {member.process.pid} on {member.node_ip}{inside}")
        if roster.supervisor is not None:
            print(f"  supervisor: pid {roster.supervisor.pid}")
    return 0


def _run_one(options: argparse.Namespace) -> int:
    seed = random.SystemRandom().randrange(1 << 30) if options.seed is None else options.seed
    target = Target(options.rank, options.stage, options.node, (), options.count)
    fault = Fault(options.kind, target, Timing(phase=options.phase), seed, options.duration, options.exit_code)
    with controller(options) as control:
        return _strike_all(control, options, iter([(0.0, fault)]), seed)


def _run_storm(options: argparse.Namespace) -> int:
    from resilient_executor.chaos.targets import Refused

    seed = random.SystemRandom().randrange(1 << 30) if options.seed is None else options.seed
    protect = tuple(_rank(text) for text in options.protect)
    try:
        wanted = {Kind(kind): 1 for kind in options.kinds.split(",") if kind}
    except ValueError as error:
        raise Refused(f"--kinds: {error}; known are {', '.join(kind.value for kind in Kind)}") from None
    with controller(options) as control:
        kinds = wanted or dict(MIXTURE)
        if not wanted and not all(hasattr(m.handle, "inject") for m in control.roster().members):
            kinds = {kind: weight for kind, weight in MIXTURE.items() if TRAITS[kind].needs is Needs.CLUSTER}
            print("the executor was not started with allow_chaos: no faults inside workers")
        return _strike_all(control, options, storm(options, seed, kinds, protect), seed)


def storm(
    options: argparse.Namespace, seed: int, kinds: dict[Kind, int], protect: tuple[int, ...]
) -> Iterator[tuple[float, Fault]]:
    """(seconds to wait, fault): pauses are exponential, so that faults come in clusters, as they do in life."""
    rng, passed = random.Random(seed), 0.0
    for _ in range(options.max_faults):
        pause = rng.expovariate(1 / options.mtbf)
        passed += pause
        if passed > options.duration:
            return
        yield pause, draw(rng, kinds, protect)


def _strike_all(control: Any, options: argparse.Namespace, plan: Iterator[tuple[float, Fault]], seed: int) -> int:
    from resilient_executor.chaos.control import await_steady, steady

    steady(control.roster())
    print(f"seed {seed}; steady state: ok")
    done: list[dict[str, Any]] = []
    survived, why, epoch = True, "", control.roster().epoch
    last: Any = None
    try:
        for pause, fault in plan:
            if options.dry_run:
                _, _, names = control.plan(fault)
                print(f"would wait {pause:.1f} s: {fault.describe()}: {', '.join(names) or 'nobody'}")
                continue
            time.sleep(pause)
            strike = control.strike(fault, len(done))
            if strike is None:
                print(f"{fault.describe()}: nobody was there to be hit")
                continue
            print(f"{time.strftime('%H:%M:%S')} {fault.describe()}: {', '.join(strike.victims)}")
            last = strike
            done.append({"at": strike.at, "fault": fault.to_json(), "victims": strike.victims, "epoch": strike.epoch})
            epoch = strike.epoch if fault.felt else epoch
            if control.roster().state == "FAILED":
                break
        if last is not None:
            try:
                if not last.fault.felt:  # it lasts as long as it was asked to; one that is felt may end with its victim
                    time.sleep(max(0.0, last.at + last.fault.duration_s - time.time()))
                after = epoch if last.fault.felt else 0
                print(f"steady again after {await_steady(control.roster, options.within, after):.1f} s")
            except Exception as error:  # noqa: BLE001 - whatever keeps it from being steady is the verdict
                survived, why = False, str(error)
    finally:
        control.heal()
        if options.json is not None and not options.dry_run:
            result = {"seed": seed, "survived": survived, "why": why, "faults": done}
            options.json.write_text(json.dumps(result, indent=1) + "\n")
    if not options.dry_run:
        print(f"{len(done)} faults: {'survived' if survived else f'NOT survived: {why}'}")
    return EXIT_SURVIVED if survived and (done or options.dry_run) else EXIT_NOT_SURVIVED


def _run_check(options: argparse.Namespace) -> int:
    from resilient_executor.chaos.checker import check
    from resilient_executor.chaos.recorder import read
    from resilient_executor.chaos.targets import Refused

    try:
        verdict = check(read(options.history))
    except (OSError, ValueError, KeyError) as error:
        raise Refused(f"{options.history} cannot be judged: {type(error).__name__}: {error}") from None
    if options.json:
        print(json.dumps(verdict.to_json(), indent=1))
    else:
        print(verdict.headline())
        for problem in verdict.problems:
            print(f"  {problem}")
    return EXIT_SURVIVED if verdict.clean else EXIT_NOT_SURVIVED


def _run_report(options: argparse.Namespace) -> int:
    from resilient_executor.chaos.report import write

    page = options.output or options.history.with_suffix(".html")
    write(options.history, page)
    print(f"{page} and {page.with_suffix('.json')}")
    return 0


def seconds(text: str) -> float:
    """Read ``20``, ``20s``, ``10m``, ``500ms`` or ``1h``."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(ms|s|m|h|)", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no duration; write 20s, 10m or 500ms")
    return float(match[1]) * {"ms": 0.001, "s": 1.0, "": 1.0, "m": 60.0, "h": 3600.0}[match[2]]


def _rank(text: str) -> int:
    from resilient_executor.chaos.targets import Refused

    match = re.fullmatch(r"rank:(\d+)", text)
    if match is None:
        raise Refused(f"--protect {text!r}: write rank:0")
    return int(match[1])


if __name__ == "__main__":
    sys.exit(main())
