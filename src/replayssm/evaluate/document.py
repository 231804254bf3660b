"""A dataclass as a JSON document with a version: written, read back, and its schema."""

from __future__ import annotations

from typing import Any, Generic, TypeVar

from pydantic import TypeAdapter, ValidationError

from replayssm.errors import ContractError

T = TypeVar("T")


class Document(Generic[T]):
    """Reads and writes documents of one kind; each has a ``schema_version``.

    Args:
        kind: The dataclass.
        version: Version of its shape.
        what: What a file of this kind is called.
    """

    def __init__(self, kind: type[T], version: int, what: str) -> None:
        self._adapter: TypeAdapter[T] = TypeAdapter(kind)
        self._version, self._what = version, what

    def dump(self, value: T) -> str:
        """Return a document as JSON."""
        return self._adapter.dump_json(value, indent=1).decode()

    def parse(self, text: str) -> T:
        """Read a document back.

        Raises:
            ContractError: The text is none, or one of another version.
        """
        try:
            found: Any = self._adapter.validate_json(text)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(str(part) for part in first["loc"])
            raise ContractError("file", self._what, f"{where}: {first['msg']}") from error
        if found.schema_version != self._version:
            raise ContractError("schema_version", str(self._version), found.schema_version)
        return found  # type: ignore[no-any-return]

    def schema(self) -> dict[str, Any]:
        """Return the JSON Schema of what :meth:`dump` writes."""
        return self._adapter.json_schema(mode="serialization")
