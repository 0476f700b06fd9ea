"""Seeded requests and prompts in chunks, on a CPU.

A chunk of a prompt that is not its last one samples a token that is thrown away, and vLLM takes the draw back by the
generator's offset. CPU generators have none, and the engine fails ("CPU Generator does not use offset"). That is rare
in an undisturbed engine with a large token budget; after a rebuild, when all requests are computed again at once, it is
not.
"""

from __future__ import annotations

from typing import Any, Final

import torch

#: What vLLM subtracts from the offset for one draw.
_ONE_DRAW: Final = 4


class RewindingGenerator(torch.Generator):
    """A CPU generator whose last draw can be taken back, as vLLM does it."""

    _before: torch.Tensor

    def remember(self) -> None:
        """What is drawn from now on is the draw that can be taken back."""
        self._before = self.get_state()

    def get_offset(self) -> int:
        """Where one draw has led from 0."""
        return _ONE_DRAW

    def set_offset(self, offset: int) -> torch.Generator:
        """Take the last draw back; there is no other place to go to.

        Raises:
            ValueError: another place is asked for.
        """
        if offset != 0:
            raise ValueError(f"only the last draw can be taken back, which is offset 0, not {offset}")
        return self.set_state(self._before)


def prepare(runner: Any) -> None:
    """Before a model runner V1 samples on a CPU: its seeded requests get generators that can go back."""
    generators = runner.input_batch.generators
    for index, generator in list(generators.items()):
        if not isinstance(generator, RewindingGenerator):
            generators[index] = RewindingGenerator()
            generators[index].set_state(generator.get_state())
            runner.requests[runner.input_batch.req_ids[index]].generator = generators[index]
        generators[index].remember()
