"""A simulated model provider: scripted behaviour behind real HTTP interfaces, and its own ledger of calls and costs.

It speaks OpenAI's chat completions, Azure's variant of them, and Anthropic's Messages.

It is the plane's counterpart in the demo, the tests and the benchmarks. The same seed and the same order of requests
to a model give the same answers and the same faults.
"""

from breakwater.embedded.provider.app import SimulatedProvider
from breakwater.embedded.provider.ledger import CallLedger, LedgerCall, LedgerTotals
from breakwater.embedded.provider.script import (
    ProviderScript,
    ScriptError,
    build_script,
    load_script,
    parse_script,
    price_nano,
)

__all__ = [
    "CallLedger",
    "LedgerCall",
    "LedgerTotals",
    "ProviderScript",
    "ScriptError",
    "SimulatedProvider",
    "build_script",
    "load_script",
    "parse_script",
    "price_nano",
]
