"""A channel carries messages from one rank to another: a row of slots in the sender's segment, used in turn.

    posted │ slot 0: state place offset bytes … │ slot 1 │ …

The sender fills a slot, marks it POSTED and counts up `posted`. The receiver waits on `posted`, reads the tensor where
it lies in the sender's memory, and marks the slot TAKEN. The sender may wait on that mark before it uses the tensor
again. Each number has one writer at a time, and is a futex: a thread that waits for it sleeps in the kernel.

Of a tensor on a GPU, both marks come before the GPU has done the work. So such a message has a number, and its slot two
words that GPUs write: the sender's writes the number to `ready`, the receiver's to `read` (`order.py`).
"""

from __future__ import annotations

import struct
import threading

from microparallel.transport.shared_memory import futex
from microparallel.transport.shared_memory.segment import Segment

SLOTS = 127
STEPS = 64  # between the numbers of two messages
LANES = 2  # collectives, and messages between two ranks
CHANNEL_BYTES = 64 * (SLOTS + 1)
FREE, POSTED, TAKEN = 0, 1, 2
SEGMENT = 0  # places: in the segment; above, regions (`regions.py`)
COPIED = 2**63  # added to a place where the tensor was copied, so that its rank may go on and change it
_CONTENT = struct.Struct("=IQQQQI")  # of a slot, behind its state: tag, place, offset, size, signature, number
_NUMBER, _READY, _READ = 10, 11, 12  # the words of a slot that are about a GPU
_WORDS, _LONGS = CHANNEL_BYTES // 4, CHANNEL_BYTES // 8


class Channel:
    """Messages from one rank to another: the sender and the receiver each have such an object for the same slots."""

    def __init__(self, segment: Segment, start: int) -> None:
        self._segment = segment
        self._map = segment.map
        self._words = segment.words
        self._longs = segment.longs
        self._first_word = start // 4
        self._first_long = start // 8
        self._address = segment.address + start
        self.gpu_address = self._address  # the same place, as this process's GPU knows it
        self.count = 0  # how many messages this process has posted, or taken without a gap
        self._taken_early: set[int] = set()  # the numbers of messages that this process has taken beyond `count`
        self.lock = threading.Lock()  # held by the thread of this process that posts or takes

    # A slot's 64 bytes: state, tag; place, offset, size, signature (64 bits each); number, `ready`, `read`.

    def post(self, tag: int, place: int, offset: int, size: int, signature: int, number: int = 0) -> int:
        """Offer a message; returns its slot, whose state must not be POSTED."""
        slot = self.count % SLOTS
        self.count += 1  # first: a thread that reads the slot's state from now on must know that the message is another
        word = self._first_word + 16 * (slot + 1)
        _CONTENT.pack_into(self._map, 4 * word + 4, tag, place, offset, size, signature, number)
        self._words[word] = POSTED
        self._words[self._first_word] = self.count & 0xFFFFFFFF
        futex.wake(self._address)
        return slot

    def posted(self) -> int:
        """How many messages have been posted, modulo 2³²."""
        return self._words[self._first_word]

    def posted_address(self) -> int:
        """The address to sleep on until more messages are posted."""
        return self._address

    def state(self, slot: int) -> int:
        """FREE, POSTED or TAKEN."""
        return self._words[self._first_word + 16 * (slot + 1)]

    def state_address(self, slot: int) -> int:
        """The address to sleep on until a slot's state changes."""
        return self._address + 64 * (slot + 1)

    def tag(self, slot: int) -> int:
        """The tag of the message in a slot."""
        return self._words[self._first_word + 16 * (slot + 1) + 1]

    def read(self, slot: int) -> tuple[int, int, int, int]:
        """What the sender wrote into a slot: place, offset, size, signature."""
        long = self._first_long + 8 * (slot + 1)
        return self._longs[long + 1], self._longs[long + 2], self._longs[long + 3], self._longs[long + 4]

    def lies_at(self, segment: Segment, gpu_address: int) -> None:
        """Say where a segment lies for this process's GPU; nothing changes if this channel lies in another one."""
        if segment is self._segment:
            self.gpu_address = gpu_address + self._address - segment.address

    # ── of tensors on a GPU ─────────────────────────────────────────────────────────────────────────────────────

    def next_number(self) -> int:
        """The number of the next message, for a GPU to write: never 0, and a later message's is larger, modulo 2³².

        A message may be read step by step (`comms/in_place.py`): the numbers between this and the next say how far.
        """
        return (STEPS * self.count + 1) & 0xFFFFFFFF

    def number(self, slot: int) -> int:
        """The number of a message; 0 if the host's order is enough for it."""
        return self._words[self._first_word + 16 * (slot + 1) + _NUMBER]

    def ready_at(self, slot: int) -> int:
        """Where the sender's GPU writes a message's number when its tensor may be read: an address for this GPU."""
        return self.gpu_address + 64 * (slot + 1) + 4 * _READY

    def read_at(self, slot: int) -> int:
        """Where the receiver's GPU writes a message's number when it has read the tensor."""
        return self.gpu_address + 64 * (slot + 1) + 4 * _READ

    def is_read(self, slot: int, number: int) -> bool:
        """Whether the receiver's GPU has read the message of this number."""
        read = self._words[self._first_word + 16 * (slot + 1) + _READ]
        return (read - number) % 2**32 < 2**31

    def release(self) -> None:
        """Let no GPU wait for any of these messages: the process that would have written is gone."""
        for slot in range(SLOTS):
            word = self._first_word + 16 * (slot + 1)
            last = (self._words[word + _NUMBER] + STEPS - 1) & 0xFFFFFFFF
            self._words[word + _READY] = self._words[word + _READ] = last

    # ── taking in another order than posted ─────────────────────────────────────────────────────────────────────

    def find(self, tag: int, posted: int) -> int | None:
        """The number of the first message with this tag that this process has not taken; None if there is none.

        The slots' states do not show it: the sender may have filled a slot again as soon as its message was taken.
        """
        number = self.count
        while number % 2**32 != posted:
            if number not in self._taken_early and self.tag(number % SLOTS) == tag:
                return number
            number += 1
        return None

    def take_number(self, number: int) -> None:
        """Take a message, which need not be the next one."""
        self._taken_early.add(number)
        while self.count in self._taken_early:
            self._taken_early.remove(self.count)
            self.count += 1
        self.take(number % SLOTS)

    def take(self, slot: int) -> None:
        """Tell the sender that its message has been read, or that its number will be written when it has."""
        self._words[self._first_word + 16 * (slot + 1)] = TAKEN
        futex.wake(self._address + 64 * (slot + 1))
