"""The blocks of the KV cache, as the scheduler counts them."""

from __future__ import annotations

from resilient_executor.reference.errors import CacheExhausted


class BlockPool:
    """Numbers 0 .. num_blocks-1 that are handed out and taken back.

    The workers' cache tensors have one block behind each number. All ranks use the same numbers.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))

    @property
    def num_free(self) -> int:
        """Blocks that can be allocated now."""
        return len(self._free)

    def allocate(self, count: int) -> list[int]:
        """Take ``count`` blocks.

        Raises:
            CacheExhausted: fewer are free; none was taken.
        """
        if count > len(self._free):
            raise CacheExhausted(f"{count} cache blocks wanted, {len(self._free)} of {self.num_blocks} free")
        return [self._free.pop() for _ in range(count)]

    def free(self, blocks: list[int]) -> None:
        """Give ``blocks`` back."""
        self._free.extend(reversed(blocks))
