"""What a demo will do, drawn from its seed before anything starts: the requests, and whom to kill when. Pure.

Moments are told in terms of the run (after so many tokens, in that phase of a rebuild), not of the clock, so that the
same seed means the same plan on a slow machine and on a fast one.
"""

from __future__ import annotations

import enum
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from resilient_executor.reference.request import SamplingParams

#: The first ones begin paragraphs of the text that the checkpoint was trained on, and read best.
PROMPTS: Final = (
    "But the attention of every lady was soon caught by a young",
    "Elizabeth joined them again only to say that her sister was worse,",
    "When the tea-things were removed, and the card-tables placed, the ladies all",
    "There was just such an informality in the terms of the bequest",
    '"I have not the smallest objection to explaining them," said he, as',
    '"The engagement between them is of a peculiar kind. From their infancy,',
    '"I have just received your letter, and shall devote this whole morning',
    '"Well," cried her mother, "it is all very right; who should do',
    "Mr. Darcy",
    "It was a fine evening, and",
    "The house stood on",
    "She could not",
)
SAMPLINGS: Final = ("mixed", "greedy", "seeded")
#: Phases of a rebuild in which new workers can be killed, with the longest delay after their beginning, and a weight.
#: The first is seconds long, and may be met at any moment of its first one; the others are over in a blink.
_PHASES: Final = (("initialise", 0.8, 4), ("load", 0.01, 1), ("compile", 0.05, 2), ("warm_up", 0.01, 1))
#: A kill in service comes this much later than its token, at most, so that it meets any moment of a step.
_JITTER_S: Final = 0.03
#: Share of a round's tokens after which a kill in service comes, at least and at most.
_EARLIEST, _LATEST = 0.15, 0.5
#: How many of the kills that are free to choose fall into a rebuild.
_IN_REBUILD: Final = 0.4


@dataclass(frozen=True)
class DemoOptions:
    """What the user asked for.

    Attributes:
        seed: of the plan and of the requests.
        plain: lines instead of the live display.
        json_path: where the report goes, or None.
        address: Ray cluster, see ``ExecutorConfig.address``.
    """

    tensor_parallel_size: int
    pipeline_parallel_size: int
    kills: int
    seed: int
    requests: int
    max_tokens: int
    sampling: str
    plain: bool
    json_path: Path | None
    address: str

    @property
    def world_size(self) -> int:
        """Number of workers."""
        return self.tensor_parallel_size * self.pipeline_parallel_size


@dataclass(frozen=True)
class DemoRequest:
    """One prompt of a round."""

    prompt: str
    params: SamplingParams

    @property
    def sampling(self) -> str:
        """``greedy`` or ``seeded``."""
        return "seeded" if self.params.temperature > 0 else "greedy"


class Moment(str, enum.Enum):
    """When a kill comes."""

    IN_SERVICE = "in service"  #: while steps are in flight
    IN_REBUILD = "in rebuild"  #: while the executor recovers from the kill before


@dataclass(frozen=True)
class PlannedKill:
    """One kill of the plan.

    Attributes:
        number: counted from 1.
        rank: who; another one, if that process is gone already.
        moment: in service or in a rebuild.
        after_tokens: in service: after this many tokens since service began (again).
        phase: in a rebuild: in this phase of it.
        delay_s: so much later.
    """

    number: int
    rank: int
    moment: Moment
    after_tokens: int = 0
    phase: str = ""
    delay_s: float = 0.0


def draw_requests(options: DemoOptions) -> tuple[DemoRequest, ...]:
    """The requests of every round."""
    rng = random.Random(f"requests {options.seed}")
    requests = []
    for number in range(options.requests):
        # Every request goes on to its last token, so that all rounds of all runs have the same size.
        greedy = options.sampling == "greedy" or (options.sampling == "mixed" and number % 2 == 0)
        params = (
            SamplingParams(max_tokens=options.max_tokens, ignore_eos=True)
            if greedy
            else SamplingParams(
                max_tokens=options.max_tokens, temperature=0.8, top_p=0.95, seed=rng.getrandbits(32), ignore_eos=True
            )
        )
        requests.append(DemoRequest(PROMPTS[number % len(PROMPTS)], params))
    return tuple(requests)


def draw_kills(options: DemoOptions) -> tuple[PlannedKill, ...]:
    """The kills: the first one in service, the second one in the rebuild that follows, the others either way."""
    rng = random.Random(f"kills {options.seed}")
    tokens = options.requests * options.max_tokens
    # Two tokens of every request first: one that never gets on between two deaths would rightly be taken for their
    # cause and be given up.
    earliest = max(2 * options.requests, int(tokens * _EARLIEST))
    latest = max(earliest, int(tokens * _LATEST))
    kills = []
    for number in range(1, options.kills + 1):
        rank = rng.randrange(options.world_size)
        if number == 2 or (number > 2 and rng.random() < _IN_REBUILD):
            [(phase, longest_s, _)] = rng.choices(_PHASES, weights=[weight for *_, weight in _PHASES])
            delay_s = rng.uniform(0.0, longest_s)
            kills.append(PlannedKill(number, rank, Moment.IN_REBUILD, phase=phase, delay_s=delay_s))
        else:
            after_tokens = rng.randint(earliest, latest)
            delay_s = rng.uniform(0.0, _JITTER_S)
            kills.append(PlannedKill(number, rank, Moment.IN_SERVICE, after_tokens=after_tokens, delay_s=delay_s))
    return tuple(kills)
