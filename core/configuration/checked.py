"""A metaclass for parameter classes that users construct: it checks field names and types."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TypeVar, cast

import msgspec

from core.configuration.suggest import did_you_mean
from core.errors import RequestError

T = TypeVar("T")


class Checked(type(msgspec.Struct)):
    """Makes the constructor check names and types, and treat None as "not given".

    A class may set the value that None stands for in a field (`_if_none`, by field name), and
    define aliases of its fields (`_other_names`, alias to field name). The constructor raises
    RequestError with the name of the field.
    """

    _if_none: Mapping[str, object] = {}
    _other_names: Mapping[str, str] = {}

    def __call__(cls: type[T], **values: object) -> T:
        known = cast(tuple[str, ...], cls.__struct_fields__)  # pyright: ignore
        values = {cls._other_names.get(name, name): value for name, value in values.items()}  # pyright: ignore
        for name in values:
            if name not in known:
                raise RequestError(name, f"no such parameter{did_you_mean(name, known)}")
        fields = {name: value for name, value in values.items() if value is not None}
        for name in values.keys() & cls._if_none:  # pyright: ignore
            fields.setdefault(name, cls._if_none[name])  # pyright: ignore
        try:
            return msgspec.convert(fields, cls)
        except msgspec.ValidationError as error:
            message, _, path = str(error).partition(" - at `$.")
            raise RequestError(re.split(r"\W", path)[0], message) from None
