"""Prices of the simulated provider, in integers.

The ledger is the witness that the plane's own account is checked against, so it must not share the plane's price code:
the rule is the same, the lines are not.
"""

from __future__ import annotations

from decimal import Decimal, InvalidOperation
from fractions import Fraction
from typing import Annotated

from pydantic import BeforeValidator, PlainSerializer

NANO_PER_USD = 1_000_000_000
TOKENS_PER_MTOK = 1_000_000


def nano_per_mtok(usd: object) -> int:
    """Reads a price in USD per million tokens as integer nano-dollars per million tokens.

    Args:
        usd: `"0.15"`, or a number as YAML reads an unquoted one (taken in its shortest decimal form).

    Raises:
        ValueError: it is no amount, is negative, or is finer than a nano-dollar (nine decimal places).
    """
    try:
        nano = Fraction(Decimal(str(usd))) * NANO_PER_USD
    except (InvalidOperation, ValueError, OverflowError) as error:
        raise ValueError(f"{usd!r} is not a price; write USD per million tokens, like '0.15'") from error
    if nano.denominator != 1 or nano < 0:
        raise ValueError(f"{usd!r} must not be negative nor have more than nine decimal places")
    return int(nano)


def usd_per_mtok(nano: int) -> str:
    """The inverse of `nano_per_mtok`: a dumped script can be read again."""
    return f"{Decimal(nano) / NANO_PER_USD:f}"


NanoPerMtok = Annotated[int, BeforeValidator(nano_per_mtok), PlainSerializer(usd_per_mtok)]
"""Written as USD per million tokens; integer nano-dollars per million tokens in Python."""


def price_nano(
    *,
    input_tokens: int,
    output_tokens: int,
    cached_tokens: int,
    input_nano_per_mtok: int,
    output_nano_per_mtok: int,
    cached_input_nano_per_mtok: int,
) -> int:
    """What one call costs in whole nano-dollars.

    The exact sum of the three parts is rounded half up, once: rounding each part would drift by up to a nano-dollar and
    a half a call. The plane's own price function follows the same rule, so the two agree to the nano-dollar.

    Args:
        input_tokens: all input tokens, the cached ones included.
        output_tokens: tokens of the answer.
        cached_tokens: the part of `input_tokens` that was read from the provider's cache.
        input_nano_per_mtok: nano-dollars per million fresh input tokens.
        output_nano_per_mtok: nano-dollars per million output tokens.
        cached_input_nano_per_mtok: nano-dollars per million cached input tokens.
    """
    exact = (
        (input_tokens - cached_tokens) * input_nano_per_mtok
        + cached_tokens * cached_input_nano_per_mtok
        + output_tokens * output_nano_per_mtok
    )
    return (exact + TOKENS_PER_MTOK // 2) // TOKENS_PER_MTOK
