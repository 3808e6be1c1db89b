"""A simulated model provider: scripted behaviour behind real HTTP interfaces, and its own ledger of calls and costs.

It speaks OpenAI's chat completions, Responses and embeddings, Azure's variants of the first and the last, and
Anthropic's Messages.

It is the plane's counterpart in the demo, the tests and the benchmarks. The same seed and the same order of requests
to a model give the same answers and the same faults. A call goes through the modules in this order: `app` receives it,
the module of its interface reads it, `behaviour` decides by the `script`, `reply` has that module write the answer and
breaks it where it is to be broken, `app` sends it, and the `ledger` keeps it.
"""

from breakwater.local.provider.app import SimulatedProvider
from breakwater.local.provider.ledger import LedgerCall
from breakwater.local.provider.script import ScriptError, build_script

__all__ = [
    "LedgerCall",
    "ScriptError",
    "SimulatedProvider",
    "build_script",
]
