"""Does once in the fork server what each service would do again at its start; the server imports this module last."""

import importlib

from breakwater.redaction.rules.redact import Redactor
from breakwater.redaction.settings import RedactionRules

Redactor.compile(RedactionRules())
# FastStream imports the first when it starts, and a worker the others when it opens its providers.
providers = (f"breakwater.calls.providers.{kind}" for kind in ("anthropic", "http", "openai", "process", "python"))
for module in ("anyio._backends._asyncio", *providers):
    importlib.import_module(module)
