"""How a rank's flight file is laid out: fixed places, so that it can be read while it is written, or after its writer.

```
  0     head     who writes this: magic, version, process, rank, world, host, when it began
  512   step     the number of the training step; -1 where nobody counts
  1024  doing    what the rank does now, in its own words
  2048  end      how it ended: in order, or with which error; what its parent knows of its exit
  4096  groups   64 × 256 bytes: the ranks of the groups that the records name
  20480 records  256 × 512 bytes, used in turn
```

Whatever is longer than a machine word begins with a number that is 0 while the rest is being written. So a rank that
was killed in the middle leaves a gap, never half a record.
"""

from __future__ import annotations

import struct

MAGIC = b"mpflight"
VERSION = 1

# magic, version, pid, rank, world size, parent's pid, the process's start in clock ticks, wall clock, monotonic clock,
# whether it answers the signal, host, world
HEAD = struct.Struct("<8sIiiiiQddi64s128s")
ANSWERS = struct.Struct("<i")
ANSWERS_AT = struct.calcsize("<8sIiiiiQdd")

STEP_AT = 512
STEP = struct.Struct("<q")

NUMBER = struct.Struct("<Q")

DOING_AT = 1024
DOING = struct.Struct("<d256s")  # since when, what; after its number

END_AT = 2048
END = struct.Struct("<Bi128s600s")  # kind, line, file, words; after its number
EXIT_AT = 3072
EXIT = struct.Struct("<i")  # the exit status as `subprocess` gives it; after its number

GROUPS_AT = 4096
GROUPS = 64
GROUP_BYTES = 256
GROUP = struct.Struct("<248s")  # its ranks and its number among the groups of these ranks; after its number

RECORDS_AT = GROUPS_AT + GROUPS * GROUP_BYTES
RECORDS = 256
RECORD_BYTES = 512
# sequence, group, peer, tag, kind, outcome, waits in main thread, begun in main thread, line, bytes,
# begin, started, wait, end, call, what must agree, file; after its number
RECORD = struct.Struct("<IIiiBBBBIQdddd180s128s124s")
TIMES = struct.Struct("<d")
STARTED_AT = NUMBER.size + struct.calcsize("<IIiiBBBBIQd")
WAIT_AT = STARTED_AT + 8
END_TIME_AT = WAIT_AT + 8
OUTCOME_AT = NUMBER.size + struct.calcsize("<IIiiB")
WAITS_IN_MAIN_AT = OUTCOME_AT + 1
BYTE = struct.Struct("<B")

FILE_BYTES = RECORDS_AT + RECORDS * RECORD_BYTES

KINDS = ("collective", "send", "recv")
OUTCOMES = ("open", "well", "timed out", "failed")
ENDINGS = ("running", "finished", "closed", "exited", "raised", "broke off")

if NUMBER.size + RECORD.size > RECORD_BYTES or HEAD.size > STEP_AT:
    raise AssertionError("a record does not fit its place")


def cut(text: str, size: int) -> bytes:
    """A text in so many bytes; one that is too long keeps its beginning, and something that tells it from others."""
    content = text.encode("utf-8", "replace")
    if len(content) <= size:
        return content
    import zlib

    mark = f"…#{zlib.crc32(content):08x}".encode()
    return content[: size - len(mark)].decode("utf-8", "ignore").encode() + mark


def uncut(content: bytes) -> str:
    """The text back."""
    return content.rstrip(b"\0").decode("utf-8", "replace")
