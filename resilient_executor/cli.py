"""The command ``resilient-executor``.

What a user did wrong, and what could not be started, is one line on stderr and exit code 2. Ctrl-C ends what was
started, and gives exit code 130.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import random
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, NoReturn

from resilient_executor.config import ENV_PREFIX
from resilient_executor.errors import ResilientExecutorError

PROGRAM: Final = "resilient-executor"
EXIT_USAGE: Final = 2
EXIT_INTERRUPTED: Final = 130

_DEMO: Final = """\
Answer prompts while the workers that answer them are killed, and check every token.

A small language model is served by tensor-parallel times pipeline-parallel worker processes. First they answer all
prompts undisturbed. Then they answer them again, while a thread kills workers with SIGKILL at moments drawn from the
seed: the first one in service, the second one during the rebuild that follows, the others either way. At the end every
token is compared with the undisturbed run."""

_DEMO_END: Final = """\
exit codes:
  0    every token is identical, every planned kill was delivered, and no process is left behind
  1    one of these is not so; the last lines say which
  2    it could not be started; one line on stderr says why
  130  Ctrl-C; everything that was started has been ended

examples:
  %(prog)s                                    three kills, four workers
  %(prog)s --kills 10 --seed 7                more of it, and the same again with the same seed
  %(prog)s --tensor-parallel-size 1 --pipeline-parallel-size 4
  %(prog)s --plain --json report.json         for logs and programs
"""


class _Parser(argparse.ArgumentParser):
    """Says in one line what is wrong with the arguments."""

    def error(self, message: str) -> NoReturn:
        self.exit(EXIT_USAGE, f"{self.prog}: error: {message} (see {self.prog} --help)\n")


class _Help(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Shows defaults, and leaves descriptions as they are."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command.

    Args:
        argv: its arguments without the program's name; None takes the process's.

    Returns:
        the exit code.
    """
    parser = make_parser()
    try:
        options = parser.parse_args(argv)
        if options.run is None:
            parser.print_help(sys.stderr)
            return EXIT_USAGE
        run: Callable[[argparse.Namespace], int] = options.run
        return run(options)
    except SystemExit as end:  # argparse: --help, --version, and what it has found wrong
        return end.code if isinstance(end.code, int) else 0
    except KeyboardInterrupt:
        print(f"{PROGRAM}: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # Nobody reads what we print. Python would complain about that once more, at its exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (ResilientExecutorError, OSError) as error:
        print(f"{PROGRAM}: error: {' '.join(str(error).split())}", file=sys.stderr)
        return EXIT_USAGE


def make_parser() -> argparse.ArgumentParser:
    """The command line, with all its subcommands."""
    parser = _Parser(
        prog=PROGRAM,
        description="A fault-tolerant executor for distributed model inference on Ray.",
        epilog=f"Try: {PROGRAM} demo. What a command can do: {PROGRAM} COMMAND --help",
    )
    parser.add_argument("--version", action="version", version=f"{PROGRAM} {importlib.metadata.version(PROGRAM)}")
    parser.set_defaults(run=None)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", parser_class=_Parser)
    _add_demo(commands.add_parser)
    _add_status(commands.add_parser)
    _add_stacks(commands.add_parser)
    return parser


def _add_demo(add_parser: Callable[..., argparse.ArgumentParser]) -> None:
    parser = add_parser(
        "demo",
        help="answer prompts, kill workers meanwhile, and check every token",
        description=_DEMO,
        epilog=_DEMO_END,
        formatter_class=_Help,
    )
    parser.add_argument("--tensor-parallel-size", type=_at_least(1), default=2, metavar="N", help="ranks in a stage")
    parser.add_argument("--pipeline-parallel-size", type=_at_least(1), default=2, metavar="N", help="pipeline stages")
    parser.add_argument("--kills", type=_at_least(0), default=3, metavar="N", help="workers to kill")
    parser.add_argument(
        "--seed",
        type=_at_least(0),
        default=argparse.SUPPRESS,
        metavar="N",
        help="of the plan and of the sampling; the same seed makes the same plan (default: a random one, printed)",
    )
    parser.add_argument("--requests", type=_at_least(1), default=6, metavar="N", help="prompts in a round")
    parser.add_argument("--max-tokens", type=_at_least(1), default=80, metavar="N", help="tokens of each answer")
    parser.add_argument(
        "--sampling",
        choices=("mixed", "greedy", "seeded"),
        default="mixed",
        help="how tokens are chosen: the likeliest, or at random from a seed; mixed has both by turns",
    )
    parser.add_argument(
        "--plain", action="store_true", default=argparse.SUPPRESS, help="print lines, also on a terminal; no colours"
    )
    parser.add_argument(
        "--json", type=_writable, default=argparse.SUPPRESS, metavar="FILE", help="write the whole report there, too"
    )
    parser.add_argument(
        "--address",
        default="local",
        help="Ray cluster whose workers on this machine may be killed; local starts an embedded one of its own",
    )
    parser.set_defaults(run=_run_demo)


def _add_status(add_parser: Callable[..., argparse.ArgumentParser]) -> None:
    parser = add_parser(
        "status",
        help="show a running executor: ranks, epoch, last incidents",
        description="Show what a running executor's endpoint says (setting status_port).",
        epilog="exit codes: 0 it is healthy; 1 it is not; 2 nobody answers; 130 Ctrl-C",
        formatter_class=_Help,
    )
    _add_url(parser)
    parser.add_argument(
        "--watch", nargs="?", type=_seconds, const=1.0, default=argparse.SUPPRESS, metavar="SECONDS",
        help="show it again and again, until Ctrl-C",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", default=argparse.SUPPRESS, help="print the data as JSON, once")
    parser.set_defaults(run=_run_status)


def _run_status(arguments: argparse.Namespace) -> int:
    from resilient_executor import views

    return views.show_status(
        arguments.url, watch_s=getattr(arguments, "watch", None), as_json=getattr(arguments, "json", False)
    )


def _add_stacks(add_parser: Callable[..., argparse.ArgumentParser]) -> None:
    parser = add_parser(
        "stacks",
        help="show what every rank of a running executor is doing, with its Python stacks",
        description="Show what every rank is doing, with the Python stacks of its threads; also of those that hang.",
        formatter_class=_Help,
    )
    _add_url(parser)
    parser.set_defaults(run=_run_stacks)


def _run_stacks(arguments: argparse.Namespace) -> int:
    from resilient_executor import views

    return views.show_stacks(arguments.url)


def _add_url(parser: argparse.ArgumentParser) -> None:
    host = os.environ.get(f"{ENV_PREFIX}STATUS_HOST", "127.0.0.1")
    port = os.environ.get(f"{ENV_PREFIX}STATUS_PORT", "8090")
    parser.add_argument(
        "--url",
        default=f"http://{f'[{host}]' if ':' in host else host}:{port}",
        help=f"the endpoint; {ENV_PREFIX}STATUS_HOST and _STATUS_PORT set the default",
    )


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0.1 <= value <= 3600:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds from 0.1 to 3600")
    return value


def _run_demo(arguments: argparse.Namespace) -> int:
    try:
        from resilient_executor.reference import demo
    except ModuleNotFoundError as missing:
        print(
            f"{PROGRAM}: error: the demo needs the reference engine ({missing.name} is missing): "
            f"pip install '{PROGRAM}[reference]'",
            file=sys.stderr,
        )
        return EXIT_USAGE
    seed = getattr(arguments, "seed", None)
    return demo.run(
        demo.DemoOptions(
            tensor_parallel_size=arguments.tensor_parallel_size,
            pipeline_parallel_size=arguments.pipeline_parallel_size,
            kills=arguments.kills,
            seed=random.SystemRandom().randrange(10_000) if seed is None else seed,
            requests=arguments.requests,
            max_tokens=arguments.max_tokens,
            sampling=arguments.sampling,
            plain=getattr(arguments, "plain", False),
            json_path=getattr(arguments, "json", None),
            address=arguments.address,
        )
    )


def _at_least(least: int) -> Callable[[str], int]:
    """A parser of whole numbers from ``least``."""

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = None
        if value is None or value < least:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least {least}")
        return value

    return parse


def _writable(text: str) -> Path:
    """A file that can be written: found out now, not after a minute's run."""
    path = Path(text)
    if path.is_dir() or not path.parent.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise argparse.ArgumentTypeError(f"{text!r} cannot be written: name a file in a folder that exists")
    return path
