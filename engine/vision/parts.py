"""Makes the part of a request that has images."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from core.configuration.limits import IMAGES_IN_USE
from core.errors import OverloadedError
from core.images import Images
from core.part import Part
from core.protocol.facts import Facts
from core.protocol.messages import EncodedPrompt, Submit


def image_parts(
    message: Submit, facts: Facts, in_use: Callable[[], Iterable[Part]]
) -> tuple[Part, ...]:
    """Return the parts of a request for its images.

    in_use: returns the parts of the engine's other requests. Raises RequestError if the request
    cannot have these images, and OverloadedError if theirs leave no room.
    """
    if not message.images:
        return ()
    EncodedPrompt(message.prompt_token_ids, message.images).check(message.params, facts)
    part = Images(message.images)
    others = (other.num_bytes for other in in_use() if isinstance(other, Images))
    if part.num_bytes + sum(others) > IMAGES_IN_USE.maximum:
        raise OverloadedError(f"the images in use have more than {IMAGES_IN_USE.maximum} bytes")
    return (part,)
