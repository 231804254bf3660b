"""Server-sent events out of bytes, whatever the cuts between reads."""

from __future__ import annotations

DONE = "[DONE]"
BOM = b"\xef\xbb\xbf"


class EventDecoder:
    """Collects the data of events.

    Lines end in LF, CR or CR LF; an empty line ends an event. Comments (keep-alives), fields other
    than ``data`` and events without data are left out. Bytes are decoded line by line, so a
    character may be cut.
    """

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[str] = []
        self._is_first = True
        self._skip_lf = False

    def feed(self, received: bytes) -> list[str]:
        """Return the data of every event that these bytes complete.

        Raises:
            UnicodeDecodeError: A line is not UTF-8.
        """
        if self._skip_lf and received:
            # the second half of a CR LF that was cut
            received = received.removeprefix(b"\n")
            self._skip_lf = False
        buffer = self._rest + received
        if self._is_first and len(buffer) >= len(BOM):
            buffer, self._is_first = buffer.removeprefix(BOM), False
        self._skip_lf = buffer.endswith(b"\r")
        if b"\r" in buffer:
            buffer = buffer.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        *lines, self._rest = buffer.split(b"\n")
        return [data for line in lines if (data := self._line(line)) is not None]

    def _line(self, line: bytes) -> str | None:
        if not line:
            event = "\n".join(self._data)
            self._data.clear()
            return event or None
        name, _, value = line.partition(b":")
        if name == b"data":
            self._data.append(value.removeprefix(b" ").decode())
        return None
