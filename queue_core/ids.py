"""Ids that a client makes itself, so that what it sent can be found again when the answer was lost."""

import os
import time

from queue_core.model import RequestId


def time_ordered_uuid() -> str:
    """A UUID of version 7: its leading time keeps inserts on an index's last page, where a random one hits all."""
    moment = f"{time.time_ns() // 1_000_000:012x}"
    noise = os.urandom(10).hex()
    variant = "89ab"[int(noise[3], 16) & 3]
    return f"{moment[:8]}-{moment[8:]}-7{noise[:3]}-{variant}{noise[4:7]}-{noise[7:19]}"


def new_request_id() -> RequestId:
    return RequestId(time_ordered_uuid())
