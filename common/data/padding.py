"""How far published code pads texts whose padding counts."""

from typing import Literal

PadTo = Literal["batch", "max_length"]
"""To the longest text of the batch, or to the longest that the data may have."""
