"""The memory that the bodies of all running requests take."""

from __future__ import annotations

from core.errors import OverloadedError


class BodyMemory:
    """Bytes of the bodies that a process holds, with a maximum.

    A body of any size has room if it is the only one.
    """

    def __init__(self, maximum: int) -> None:
        self._maximum = maximum
        self._num_held = 0

    def take(self, num_bytes: int, *, held: int) -> None:
        """Hold more bytes of a body. `held`: bytes of the same body that are held already.

        Raises OverloadedError if there is no room for them.
        """
        is_alone = self._num_held == held
        if not is_alone and self._num_held + num_bytes > self._maximum:
            raise OverloadedError(
                f"request bodies fill all {self._maximum:,} bytes of option.max_body_memory"
            )
        self._num_held += num_bytes

    def release(self, num_bytes: int) -> None:
        self._num_held -= num_bytes
