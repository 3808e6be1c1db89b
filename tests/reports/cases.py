"""The cases: what a provider sends, and what must come of it. Each stands for a class.

Prices are $1, $2 and $0.5 per million input, output and cached tokens; 100 and 50 tokens cost 200,000 nano-dollars.
There are three tries, and one fallback. `expected` names what is looked at, see `plane.py`:

- `calls`, `fallback`: how often the first model was called, and the other one.
- `status`, `http`, `code`: of the job; of the response to the client, and OpenAI's code in it.
- `kind`, `class`, `counted`, `cost`, `basis`, `problem`, `tokens`: of the first attempt.
- `finish`, `output`, `kept`: the last attempt's reason, the record's text, and its tool calls as they came.
- `text`, `tools`, `malformed`, `foreign`: what the client has, put together from chunks if it is streamed.
"""

from __future__ import annotations

from collections.abc import Sequence

from tests.reports import answers, errors, money, repairs, shapes
from tests.reports.case import Case

CASES: Sequence[Case] = (*shapes.cases(), *money.cases(), *answers.cases(), *errors.cases(), *repairs.cases())
