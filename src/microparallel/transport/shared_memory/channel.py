"""A channel carries messages from one rank to another: a row of slots in the sender's segment, used in turn.

    posted │ slot 0: state place offset bytes … │ slot 1 │ …

The sender fills a slot, marks it POSTED and counts up `posted`. The receiver waits on `posted`, reads the tensor where
it lies in the sender's memory, and marks the slot TAKEN. The sender may wait on that mark before it uses the tensor
again. Each number has one writer at a time, and is a futex: a thread that waits for it sleeps in the kernel.

Of a tensor on a GPU, both marks come before the GPU has done the work. So a message has two events (`order.py`): the
sender's, POSTED with it, and the receiver's, TAKEN with it. The sender marks the slot FREE when it needs neither.
"""

from __future__ import annotations

import threading

from microparallel.transport.shared_memory import futex
from microparallel.transport.shared_memory.segment import Segment

SLOTS = 127
LANES = 2  # collectives, and messages between two ranks
CHANNEL_BYTES = 64 * (SLOTS + 1)
FREE, POSTED, TAKEN = 0, 1, 2
COPY, SEGMENT = 0, 1  # places: a copy in the segment, the tensor itself there; above, regions (`regions.py`)
_WORDS, _LONGS = CHANNEL_BYTES // 4, CHANNEL_BYTES // 8


class Channel:
    """Messages from one rank to another: the sender and the receiver each have such an object for the same slots."""

    def __init__(self, segment: Segment, start: int) -> None:
        self._words = segment.words
        self._longs = segment.longs
        self._first_word = start // 4
        self._first_long = start // 8
        self._address = segment.address + start
        self.count = 0  # how many messages this process has posted, or taken without a gap
        self._taken_early: set[int] = set()  # the numbers of messages that this process has taken beyond `count`
        self.lock = threading.Lock()  # held by the thread of this process that posts or takes

    # A slot's 64 bytes: state and tag (32 bits each), then place, offset, size, signature, the sender's event and the
    # receiver's (64 bits each).

    def post(self, tag: int, place: int, offset: int, size: int, signature: int, event: int = 0) -> int:
        """Offer a message; returns its slot, whose state must not be POSTED."""
        slot = self.count % SLOTS
        self.count += 1  # first: a thread that reads the slot's state from now on must know that the message is another
        word, long = self._first_word + 16 * (slot + 1), self._first_long + 8 * (slot + 1)
        self._longs[long + 1], self._longs[long + 2] = place, offset
        self._longs[long + 3], self._longs[long + 4] = size, signature
        self._longs[long + 5], self._longs[long + 6] = event, 0
        self._words[word + 1] = tag
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

    def event(self, slot: int) -> int:
        """The number of the event with which a message was posted; 0 if it needs none."""
        return self._longs[self._first_long + 8 * (slot + 1) + 5]

    def event_of_taking(self, slot: int) -> int:
        """The number of the event with which a message was taken; 0 if it needs none."""
        return self._longs[self._first_long + 8 * (slot + 1) + 6]

    def settle(self, slot: int) -> None:
        """Tell the receiver that its event of a message is needed no longer."""
        if self.event_of_taking(slot):
            self._longs[self._first_long + 8 * (slot + 1) + 6] = 0
            self._words[self._first_word + 16 * (slot + 1)] = FREE

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

    def take_number(self, number: int, event: int = 0) -> None:
        """Take a message, which need not be the next one."""
        self._taken_early.add(number)
        while self.count in self._taken_early:
            self._taken_early.remove(self.count)
            self.count += 1
        self.take(number % SLOTS, event)

    def take(self, slot: int, event: int = 0) -> None:
        """Tell the sender that its message has been read, or will be when the receiver's device comes to an event."""
        if event:
            self._longs[self._first_long + 8 * (slot + 1) + 6] = event
        self._words[self._first_word + 16 * (slot + 1)] = TAKEN
        futex.wake(self._address + 64 * (slot + 1))
