"""What is secret, and how it is recognised: names of fields, the values behind them, and forms of secrets.

Regular expressions run on RE2: time linear in the text for one search, so that no pattern can hang a worker. All of
them work on bytes: Google's wrapper counts the characters before each match where it is given a `str`, which triples
its price.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum, auto
from functools import lru_cache
from typing import Protocol, cast

import re2

SECRET_ENDINGS = (
    "password", "passwd", "passphrase", "passcode", "pwd", "secret", "secrets", "credential", "credentials",
    "api_key", "access_key", "secret_key", "private_key", "account_key", "signing_key", "encryption_key", "shared_key",
    "access_token", "refresh_token", "auth_token", "api_token", "session_token", "bearer_token", "bot_token",
    "security_token", "csrf_token", "xsrf_token", "authorization", "cookie", "connection_string", "subscription_key",
    "auth_key", "service_key", "client_key", "database_key", "db_key", "master_key", "priv_key",
)  # fmt: skip
"""A name that ends in one of these is secret, too: `OPENAI_API_KEY`, `dbPassword`, `Set-Cookie`, `api_key_2`."""

SECRET_NAMES = (
    "token", "id_token", "private_token", "jwt", "ssn", "social_security_number", "credit_card", "credit_card_number",
    "card_number", "cvv", "cvc", "bearer", "pin_code",
)  # fmt: skip
"""Secret only as the whole name, so that `input_tokens`, `pad_token` and `token_count` stay."""

COMMON_NAMES = ("auth", "email", "email_address", "phone", "phone_number")
"""Secret as the whole name of a JSON field, and words of any prose: there they count only if quoted or before a `=`.
"""

WORD_NAMES = ("pass", "pw")
"""Secret as the last word of a name (`DB_PASS`, `userPass`, but not `compass`), unless the value is a boolean.

They are words of prose, too, and so is `pin`. In a text they count if quoted or before a `=`; before a colon only if
the value has a digit in it and four characters at least: `pw: hunter2`, but neither `pass: 12` nor `pass: yes`.
"""

WORD_NAMES_ALONE = ("pin",)
"""The same, but only as the whole name: `gpio_pin` is no secret."""

QUOTED_NAMES = ("key",)
"""Secret as the whole name of a JSON field; in a text only if quoted: `sort(key=len)` is no secret."""

QUERY_NAMES = ("key", "sig", "signature", "x-amz-signature", "x-goog-signature")
"""Secret as a parameter of a URL, whatever they mean elsewhere."""

WHOLE_LINE_NAMES = (b"passphrase", b"cookie")
"""Fields whose values have spaces: in a text without quotes they end with the line."""

HARMLESS_VALUES = frozenset(b"|...|null|none|nil|undefined|true|false|str|string|bytes|int|bool".split(b"|"))
"""What follows `password:` in type annotations and empty fields."""

# Also behind an escaped line break in a text: the n of \\n is not part of the secret.
_FORM_EDGE = r"(?:\b|_|\\[abfnrtv])"

SECRET_FORMS = (
    (r"sk-", r"[A-Za-z0-9_-]{16,}"),  # OpenAI, Anthropic and their kin
    (r"bw_[0-9a-f]", r"[0-9a-f]{11}_[A-Za-z0-9_-]{16,}"),  # Breakwater's API keys
    (r"[sr]k_(?:live|test|prod)_|whsec_", r"[A-Za-z0-9+/=]{16,}"),  # Stripe, standard webhooks
    (r"AIza", r"[A-Za-z0-9_-]{30,}"),  # Google
    (r"ya29\.|GOCSPX-", r"[A-Za-z0-9_-]{20,}"),  # Google OAuth
    (r"AKIA|ASIA|ABIA|ACCA", r"[A-Z0-9]{16}\b"),  # AWS
    (r"ABSK|bedrock-api-key-", r"[A-Za-z0-9+/=]{40,}"),  # AWS Bedrock
    (r"gh[pousr]_|github_pat_", r"[A-Za-z0-9_]{20,}"),  # GitHub
    (r"gl(?:pat|dt|rt|cbt|ptt|ft|oas|soat|imt|ffct|agent)-|GR1348941", r"[A-Za-z0-9_.-]{16,}"),  # GitLab
    (r"xox[a-z]-|xapp-", r"[A-Za-z0-9-]{10,}"),  # Slack
    (r"hooks\.slack\.com/", r"(?:services|workflows|triggers)/[A-Za-z0-9/_-]+"),
    (r"discord(?:app)?\.com/api/", r"webhooks/[A-Za-z0-9/_-]+"),
    (r"webhook\.office\.com/webhookb2/", r"[A-Za-z0-9/@-]+"),  # Microsoft Teams
    # Discord: the id of the bot, decimal digits in Base64, then a time and a code.
    (r"[MNO][DTjz][AEIMQUYcgk][w-z0-5]", r"[A-Za-z0-9_-]{18,26}\.[A-Za-z0-9_-]{6}\.[A-Za-z0-9_-]{27,}"),
    (r"(?:bot)?[0-9]{8,12}:A", r"[A-Za-z0-9_-]{34}\b"),  # Telegram
    (r"hv[sbr]\.", r"[A-Za-z0-9_-]{20,}"),  # Vault
    (r"s\.[A-Za-z0-9]", r"[A-Za-z0-9]{23}\b"),  # Vault before 1.10
    (r"dapi[0-9a-f]", r"[0-9a-f]{31}"),  # Databricks
    (r"(?:SK|AC)[0-9a-f]", r"[0-9a-f]{31}\b"),  # Twilio
    (r"NR(?:AK|JS|II|IQ|RA|BR)-", r"[A-Za-z0-9_-]{16,}"),  # New Relic
    (r"dp\.(?:pt|st|ct|sa|scim|audit)\.", r"[A-Za-z0-9._-]{20,}"),  # Doppler
    (r"(?i:age-secret-key-1)", r"[A-Za-z0-9]{20,}"),  # age
    (r"(?:hf|npm|gsk|r8|do[opr]_v1|shp(?:at|ca|pa|ss))_", r"[A-Za-z0-9]{20,}"),  # Hugging Face, npm, Groq, Replicate …
    (r"(?:lin_(?:api|oauth)|pscale_(?:tkn|oauth|pw)|rubygems|rdme|sntry[su]|glsa|glc|dckr_pat|lsv2_[ps][tk])_",
     r"[A-Za-z0-9_=.+/-]{20,}"),  # Linear, PlanetScale, RubyGems, ReadMe, Sentry, Grafana, Docker, LangSmith
    (r"(?:pcsk|apify_api|sbp|sb_secret|figd|pnu|ntn|phx|duffel_(?:test|live)|shippo_(?:test|live))_",
     r"[A-Za-z0-9_=.-]{20,}"),  # Pinecone, Apify, Supabase, Figma, Prefect, Notion, PostHog, Duffel, Shippo
    (r"(?:xai|pplx|pypi|nvapi|tvly|pul|PMAK|xkeysib|sq0[ac][ts]p|HRKU|FLWSECK_TEST|tskey)-",
     r"[A-Za-z0-9_-]{20,}"),  # xAI, Perplexity, PyPI, Nvidia, Tavily, Pulumi, Postman, Brevo, Square, Heroku …
    (r"SG\.", r"[A-Za-z0-9_-]{16,}\.[A-Za-z0-9_-]{16,}"),  # SendGrid
    (r"key-[0-9a-f]", r"[0-9a-f]{31}\b"),  # Mailgun
    (r"ATATT3|LTAI", r"[A-Za-z0-9_=-]{20,}"),  # Atlassian, Alibaba
    (r"dt0[a-z][0-9]{2}\.", r"[A-Za-z0-9]{24}\.[A-Za-z0-9]{32,}"),  # Dynatrace
    (r"A3-[A-Z0-9]", r"[A-Z0-9]{5}-[A-Z0-9-]{20,}"),  # 1Password
    (r"eyJ", r"[A-Za-z0-9_-]{8,}(?:\.[A-Za-z0-9_-]{4,})+"),  # JSON web tokens, also without their signature
)  # fmt: skip
"""How secrets begin, and how they go on. The first alone is looked for: counting along in every word would
multiply the states of the automaton, and adversarial texts would find them all.

That these services' keys have these forms is taken from the rules of gitleaks 8 and detect-secrets 1.5, and from the
services' own documentation. `tests/policy/redaction_corpus.txt` measures what is found.
"""

OTHER_FORMS = (
    (r"(?i:bearer)[\s+]", r"[\s+]*(?:[A-Za-z._~+/-]*[0-9][A-Za-z0-9._~+/-]*|[A-Za-z._~+/-]{16,})=*"),
    (r"(?i:basic)[\s+]", r"[\s+]*[A-Za-z0-9+/]{8,}={1,2}"),
    (r"[0-9]{3}-[0-9]{2}-[0-9]{4}", r"\b"),  # US social security numbers
)
"""What is hidden in texts by its form, but may be in the name of a job or a task."""

PAIR_NAMES = ("name", "key", "header", "field", "variable", "id", "k", "n")
"""An object may name a value in a field of its own: `{"name": "password", "value": 1}`, and so may XML and YAML."""

PAIR_VALUES = ("value", "values", "val", "default", "v")

IBAN_START = rf"{_FORM_EDGE}[A-Z]{{2}}[0-9]{{2}}[ -]?[A-Z0-9]"
IBAN = rf"{IBAN_START}(?:[ -]?[A-Z0-9]){{10,30}}"
IBAN_LENGTHS = """
    AD24 AE23 AL28 AT20 AZ28 BA20 BE16 BG22 BH22 BR29 BY28 CH21 CR22 CY28 CZ24 DE22 DK18 DO28 EE20 EG29 ES24 FI18 FO18
    FR27 GB22 GE22 GI23 GL18 GR27 GT28 HR21 HU28 IE22 IL23 IQ23 IS26 IT27 JO30 KW30 KZ20 LB28 LC32 LI21 LT20 LU20 LV21
    LY25 MC27 MD24 ME22 MK19 MR27 MT31 MU30 NL18 NO15 PK24 PL28 PS29 PT25 QA29 RO24 RS22 SA24 SC31 SE24 SI19 SK24 SM27
    ST25 SV28 TL23 TN24 TR26 UA29 VA22 VG24 XK20
"""
"""By country, from the registry of ISO 13616."""

_IBAN_LENGTHS = {entry[:2]: int(entry[2:]) for entry in IBAN_LENGTHS.split()}

PHONE = (
    rf"(?:\+|{_FORM_EDGE}00)[1-9][0-9]{{0,2}}(?:[ ./-]?\(?[0-9]+\)?)+"
    rf"|(?:\(|{_FORM_EDGE})[2-9][0-9]{{2}}\)?[ .-]{{1,2}}[0-9]{{3}}[ .-][0-9]{{4}}\b"
    rf"|{_FORM_EDGE}0[1-9][0-9]{{1,4}}[ /-][0-9]{{3,}}(?:[ -][0-9]+)*"
)
"""International, with + or 00; American; and with an area code that begins with 0."""

PRIVATE_KEY_START = r"-----BEGIN "
PRIVATE_KEY = r"-----BEGIN [A-Z0-9 ]*PRIVATE KEY(?: BLOCK)?-----(?:\C*?-----END [A-Z0-9 ]*-----|\C*)"
"""PEM. Without its end it reaches to the end of the text: the key was cut."""

EMAIL = r"(?:[A-Za-z0-9._%+-]|\xc3[\x80-\xbf])+@(?:[A-Za-z0-9-]+\.)+[A-Za-z]{2,}"
"""ASCII and, in front of the @, Latin letters in UTF-8."""

USER_INFO = r"""://[^\s/?#"'<>@:]*:[^\s/?#"'<>]*@"""
"""`scheme://user:password@host`. A user alone stays: `ssh://git@host` is no secret."""

ISSUER = r"(?:3[04-9]|4[0-9]|5[0-8]|6[0-9]|2[2-7]|8[12]|97)"
"""What card schemes' numbers begin with. It leaves out clocks' milliseconds and years in a row before Luhn is asked."""

_GROUPS = (
    r"[0-9]{4}[ -][0-9]{4}[ -][0-9]{1,4}(?:[ -][0-9]{1,3})?",
    r"[0-9]{6}[ -][0-9]{4,5}",
    r"[0-9]{3}[ -][0-9]{3}[ -][0-9]{3}",
)
CARD = rf"{_FORM_EDGE}{ISSUER}(?:[0-9]{{11,}}|[0-9]{{2}}[ -](?:{'|'.join(_GROUPS)}))"
"""What may be a card number: a run of digits, or groups as they are printed on cards."""

ESCAPES = r"%[2-7][0-9A-Fa-f]|\\(?:u00|x)[2-7][0-9A-Fa-f]"
"""ASCII as URLs and JSON escape it."""

MAX_PROGRAM = 2_000
"""The largest pattern of a person, in RE2's instructions.

Time is proportional to them where RE2 must simulate them, as for `(a|b)*a(a|b){250}c`, whose automaton would not fit.
"""

_NO_PERL = "invalid perl operator: "
_LOOK_AROUND = tuple(_NO_PERL + operator for operator in ("(?=", "(?!", "(?<"))
_PROBES_FOR_NOTHING = (b"", b"\x00", b"\x00\x00", b"\x00 \x00\n\x00", b"\x00a\x00", b"0", b"aa", b"_ _", b"\n\n")


class RegexMatch(Protocol):
    """Where a pattern matched, in bytes."""

    def start(self) -> int:
        """The first byte."""
        ...

    def end(self) -> int:
        """The byte after the last."""
        ...


class Pattern(Protocol):
    """The part of RE2's interface that is used here."""

    @property
    def programsize(self) -> int:
        """Instructions in the compiled program."""
        ...

    def search(self, text: bytes, pos: int | None = None, endpos: int | None = None) -> RegexMatch | None:
        """The leftmost match from `pos` to `endpos`, neither of which is an edge of the text."""
        ...

    def match(self, text: bytes, pos: int | None = None) -> RegexMatch | None:
        """The match that begins at `pos`."""
        ...

    def finditer(self, text: bytes) -> Iterator[RegexMatch]:
        """All matches from left to right."""
        ...


def built_in(pattern: str) -> Pattern:
    """Compiles one of our own patterns. They work on single bytes: what is not excluded, may be any."""
    options = _options()
    options.encoding = re2.Options.Encoding.LATIN1
    options.max_mem = 64 << 20
    return cast(Pattern, re2.compile(pattern.encode("latin-1"), options))


@dataclass(frozen=True, slots=True)
class Own:
    """A pattern that a person wrote, and the same for texts that are searched together, each on lines of its own."""

    alone: Pattern
    in_lines: Pattern


def own(pattern: str) -> Own:
    """Compiles a pattern that a person wrote.

    Raises:
        ValueError: RE2 can't take it, it is too large, or it matches where there is nothing; with what to do.
    """
    try:
        # A text's edge is a line's there. What matches more than the other is sorted out by looking at the text alone.
        compiled = Own(_compiled(pattern), _compiled("(?m)" + re.sub(r"(?s)\\(.)", _line_edge, pattern)))
    except UnicodeEncodeError as error:
        raise ValueError(f"{pattern!r} is not a regular expression: it has half of a character") from error
    except re2.error as error:
        raise ValueError(
            f"{pattern!r} {_what_is_wrong(cast(bytes, error.args[0]).decode(errors='replace'))}"
        ) from error
    if compiled.alone.programsize > MAX_PROGRAM:
        raise ValueError(f"{pattern!r} is too large; lower its {{counts}}, or use + and * in their place")
    if re.search(r"\(\?[a-zA-Z]*-[a-zA-Z]*m", pattern):
        raise ValueError(f"{pattern!r} switches the flag m off, which it is anyway; leave that out")
    for probe in _PROBES_FOR_NOTHING:
        if any(found.start() == found.end() for found in compiled.alone.finditer(probe)):
            raise ValueError(f"{pattern!r} also matches where there is nothing to hide; write + for *, and leave out ?")
    return compiled


def _line_edge(escape: re.Match[str]) -> str:
    return {"A": "^", "z": "$"}.get(escape[1], escape[0])


def _compiled(pattern: str) -> Pattern:
    return cast(Pattern, re2.compile(pattern.encode(), _options()))


def _options() -> re2.Options:
    options = re2.Options()
    options.log_errors = False
    options.never_capture = True  # only the whole match is asked for, which RE2's automata find fastest
    return options


def _what_is_wrong(words: str) -> str:
    if words.startswith(_LOOK_AROUND):
        construct = words.removeprefix(_NO_PERL)
        return f"looks around, with {construct}, which RE2 can't; match the surroundings, too, or mark an edge by \\b"
    if re.fullmatch(r"invalid escape sequence: \\[1-9]", words) or words.endswith("(?P"):
        return "refers back to a group, which RE2 can't; write out what is repeated"
    if words == r"invalid escape sequence: \Z":
        return r"has \Z, which is \z in RE2"
    if "too large" in words or "repetition size" in words:
        return f"is too large ({words}); lower its {{counts}}, or use + and * in their place"
    return f"is not a regular expression of RE2's syntax: {words}"


SEPARATORS = b"-_. "

_REMEMBERED = 4096
_LONGEST_REMEMBERED = 64
_LONGEST_NAMED = 48


def squashed(name: str) -> bytes:
    """A name without what spellings differ in: `apiKey`, `Api-Key` and `API_KEY` are all `apikey`."""
    return name.lower().encode(errors="surrogatepass").translate(None, SEPARATORS)


class NameKind(Enum):
    """What a field's name says of its value."""

    HARMLESS = auto()
    SECRET = auto()
    SECRET_UNLESS_BOOLEAN = auto()
    PAIR_VALUE = auto()
    """Another field may say that it is secret."""


class SecretNames:
    """Names that are secret as a whole, and endings of names that are. A number at the end makes no difference."""

    def __init__(self, own: Iterable[str], *, built_in: bool) -> None:
        self._whole = frozenset(map(squashed, own))
        self._built_in = built_in
        self._remembered = lru_cache(_REMEMBERED)(self._look)

    def kind(self, name: str) -> NameKind:
        """What the name says."""
        return self._remembered(name) if len(name) <= _LONGEST_REMEMBERED else self._look(name)

    def names_a_secret(self, pair: Mapping[str, object]) -> bool:
        """Whether a field of an object says that its value is secret: `{"name": "password", "value": 1}`."""
        for field in _PAIR_NAMES:
            named = pair.get(field)
            if isinstance(named, str) and len(named) <= _LONGEST_NAMED and self.is_secret(named):
                return True
        return False

    def is_secret(self, name: str) -> bool:
        """Whether the value is secret, unless it is a boolean."""
        return self.kind(name) in (NameKind.SECRET, NameKind.SECRET_UNLESS_BOOLEAN)

    def _look(self, name: str) -> NameKind:
        whole = squashed(name)
        unnumbered = whole.rstrip(b"0123456789")
        if whole in self._whole:
            return NameKind.SECRET
        if self._built_in and (whole in _QUOTED or unnumbered in _WHOLE or unnumbered.endswith(_ENDINGS)):
            return NameKind.SECRET
        if self._built_in and unnumbered.endswith(_WORDS) and _LAST_WORD.search(name):
            return NameKind.SECRET_UNLESS_BOOLEAN
        return NameKind.PAIR_VALUE if whole in _PAIR_VALUES else NameKind.HARMLESS


_QUOTED = frozenset(map(squashed, QUOTED_NAMES))
_WHOLE = frozenset(map(squashed, (*SECRET_NAMES, *COMMON_NAMES)))
_ENDINGS = tuple(map(squashed, SECRET_ENDINGS))
_WORDS = tuple(map(squashed, (*WORD_NAMES, *WORD_NAMES_ALONE)))
_LAST_WORD = re.compile(
    r"(?:(?:^|[-_. ])(?i:{words})|[a-z0-9](?:{camel})|^(?i:{alone}))[-_. 0-9]*\Z".format(
        words="|".join(WORD_NAMES),
        camel="|".join(map(str.capitalize, WORD_NAMES)),
        alone="|".join(WORD_NAMES_ALONE),
    )
)
_PAIR_NAMES = (*PAIR_NAMES, *map(str.capitalize, PAIR_NAMES))
_PAIR_VALUES = frozenset(map(squashed, PAIR_VALUES))

LONGEST = 16 * 1024
"""How long a secret is at most taken to be, in bytes or characters."""

_BETWEEN = "[-_. ]*"
_ASSIGNS = r"(?::=|=>|={1,3}|:)"
_NAME_EDGE = r"(?:\b|\\[abfnrtv])"


def _any_of(names: Iterable[str]) -> str:
    """The names in all spellings that `squashed` makes one, as single bytes."""
    return f"(?:{'|'.join(_BETWEEN.join(map(_either_case, squashed(name).decode())) for name in names)})"


def _either_case(char: str) -> str:
    cases = {char} if char.isascii() else {char, char.upper()}  # of ASCII, the pattern ignores the case
    return "(?:" + "|".join(re.escape(case.encode().decode("latin-1")) for case in sorted(cases)) + ")"


_MARKS = r"[ \t*_~]*"
"""Around a name or behind the colon: `**Password:** x`."""

_STRONG = rf"(?:{_any_of(SECRET_ENDINGS)}|{_NAME_EDGE}{_any_of(SECRET_NAMES)})(?:[-_]?[0-9]+)?"
_WORD = (
    rf"(?:(?:{_NAME_EDGE}|_){_any_of(WORD_NAMES)}|{_NAME_EDGE}{_any_of(WORD_NAMES_ALONE)}"
    rf"|(?-i:[a-z0-9](?:{'|'.join(word.capitalize() for word in WORD_NAMES)})))(?:[-_]?[0-9]+)?"
)
_NO_WORD = re.compile(rb"(?=.{4})[^0-9]*[0-9]", re.DOTALL)
_PAIR_VALUE = built_in(r"""[\s,;]*(?i:\\*["']?(?:value|values|val)\\*["']?\s*[:=]\s*)""")
_BEFORE_LINE_BREAK = frozenset({b"\r", b"\n", b">", b"|", b"-", b"+"})
_LINE_BREAK = built_in(r"[>|]?[-+]?[ \t]*\r?\n[ \t]*")
_ALONE = built_in(r"""[^\s{}()<>&;]{4,}[ \t]*(?:[\r\n]|\z)""")

_BARE = built_in(
    "(?i:"
    + "|".join(
        (
            r"(?:digest|aws4-hmac-sha256|signature|hawk|oauth)[ \t]+[^\r\n]+",
            r"\([^()\r\n]*\)|\[[^][\r\n]*\]|\{[^{}\r\n]*\}",  # auth=("user", "password")
            r"[+(]?[0-9][0-9().+-]*(?: [0-9().-]+)+",  # numbers in groups
            r"""(?:(?:bearer|basic|token|api-?key|negotiate|ntlm)[ \t]+)?"""
            r"""[^\s&;"'<>:=](?:[^\s&;"'<>]|["'][a-z0-9])*""",
        )
    )
    + ")"
)
_LINE = built_in(r"""[^\r\n"']+""")
_QUOTE = built_in(r"""(?i:b|r|u|f|br|rb)?\\*["'`]""")
_BEFORE_QUOTED = frozenset(b"bBrRuUfF\\\"'`")
_UNESCAPED = {quote.encode(): built_in(rf"(?:[^{quote}\\]|\\\C)*") for quote in ('"', "'", "`")}
_ESCAPED = {
    (slashes, quote): built_in(rf"[^\\]\\{{0,{slashes}}}{quote.decode()}")
    for slashes in (1, 3, 7)
    for quote in _UNESCAPED
}
"""Inside JSON that was escaped once, twice, three times, a quote closes if no more backslashes precede it."""

_JSON = json.JSONDecoder()


def before_values(own_names: Iterable[str], *, built_in_names: bool) -> str | None:
    """A pattern for secret names with what separates them from their values, or None if there are no names."""
    quotable, assignable = [*own_names], [*own_names]
    quoted = rf"""{_BETWEEN}\\*["']\]?\s*{_ASSIGNS}\s*"""
    forms: list[str] = []
    if built_in_names:
        forms.append(rf"{_STRONG}(?:{quoted}|{_MARKS}{_ASSIGNS}{_MARKS})")
        forms.append(rf"--[a-z0-9-]*{_STRONG}[ \t]+")
        forms.append(rf"[?&]{_any_of(QUERY_NAMES)}=")
        forms.append(rf"{_WORD}(?:{quoted}|{_MARKS}(?:={{1,3}}|:){_MARKS})")
        quotable += (*SECRET_NAMES, *COMMON_NAMES, *QUOTED_NAMES)
        assignable += COMMON_NAMES
    if quotable:
        forms.append(rf"""["']{_BETWEEN}{_any_of(quotable)}{quoted}""")
    if assignable:
        forms.append(rf"{_NAME_EDGE}{_any_of(assignable)}[ \t]*={{1,3}}[ \t]*")
    return f"(?i:{'|'.join(forms)})" if forms else None


def in_pairs(own_names: Iterable[str], *, built_in_names: bool) -> str | None:
    """A pattern for secret names that are values themselves, of a field that names another. None if there are none."""
    whole, forms = [*own_names], list[str]()
    if built_in_names:
        whole += COMMON_NAMES
        forms += (rf"[a-z0-9_.-]*{_STRONG}", rf"[a-z0-9_.-]*{_WORD}")
    if whole:
        forms.append(_any_of(whole))
    named = rf"""{_NAME_EDGE}{_any_of(PAIR_NAMES)}\\*["']?\s*[:=]\s*\\*["']?(?:{"|".join(forms)})(?:\\*["']|[\s,;])"""
    return f"(?i:{named})" if forms else None


def value_of_pair(data: bytes, found: RegexMatch, placeholder: bytes) -> tuple[int, int]:
    """The span of the value that stands behind the name that was found, or before it. Empty if there is none."""
    behind = _PAIR_VALUE.match(data, found.end())
    if behind is not None:
        return _value(data, behind.start(), behind.end(), placeholder)
    nearest = data.rfind(b"val", max(0, found.start() - LONGEST), found.start())
    before = None if nearest < 0 else _PAIR_VALUE.match(data, nearest)
    if before is not None and before.end() < found.start():
        start, end = _value(data, before.start(), before.end(), placeholder)
        if end <= found.start() and not data[end : found.start()].strip(b"\"'\\ \t\r\n,;"):
            return start, end
    return found.end(), found.end()


def value_after(data: bytes, found: RegexMatch, placeholder: bytes) -> tuple[int, int]:
    """The span of the value behind a name that was found. Empty if there is none, or nothing of interest."""
    return _value(data, found.start(), found.end(), placeholder)


def _value(data: bytes, name_start: int, start: int, placeholder: bytes) -> tuple[int, int]:
    name = data[name_start:start].rstrip()
    named_in_quotes = name.rstrip(b":=> \t\r\n]").endswith((b'"', b"'"))
    if named_in_quotes and data.startswith(placeholder, start):
        return start, start + len(placeholder)
    if data[start : start + 1] in _BEFORE_LINE_BREAK and (line_break := _LINE_BREAK.match(data, start)) is not None:
        return _value_on_next_line(data, name, line_break.end())
    if data[start : start + 1] and data[start] in _BEFORE_QUOTED and (quote := _QUOTE.match(data, start)) is not None:
        return quote.end(), _closing_quote(data, quote.end())
    if named_in_quotes and data[start : start + 1] in {b"{", b"["}:
        return start, _json_end(data, start)
    squashed_name = name.rstrip(b":=*`~ \t").translate(None, SEPARATORS).lower()
    pattern = _LINE if squashed_name.endswith(WHOLE_LINE_NAMES) else _BARE
    value = pattern.match(data, start)
    bare = b"" if value is None else data[start : value.end()]
    if not bare.startswith((b"(", b"[", b"{")):
        bare = bare.rstrip(b",)]}")
    in_prose = name.rstrip(b"*`~ \t").endswith(b":") and squashed_name.rstrip(b"0123456789").endswith(_WORDS)
    harmless = bare.lower() in HARMLESS_VALUES or (in_prose and not _NO_WORD.match(bare))
    return start, start + (0 if harmless else len(bare))


def _value_on_next_line(data: bytes, name: bytes, start: int) -> tuple[int, int]:
    """The span of a value that has a line of its own, behind `password:`. Prose has more than one word in a line."""
    name = name.rstrip(b"*_`~ \t")
    if name.endswith(b":") and data[start : start + 1] in _UNESCAPED:
        return start + 1, _closing_quote(data, start + 1)
    alone = _ALONE.match(data, start) if name.endswith(b":") else None
    if alone is None or name[:-1].lower().endswith(_WORDS):
        return start, start
    value = data[start : alone.end()].rstrip()
    harmless = value.lower() in HARMLESS_VALUES or value.endswith(b":")
    return start, start + (0 if harmless else len(value))


def _closing_quote(data: bytes, start: int) -> int:
    """Where a quoted text ends. One that is cut ends with the data."""
    quote, before = data[start - 1 : start], data[max(0, start - 9) : start - 1]
    slashes = len(before) - len(before.rstrip(b"\\"))
    if slashes == 0:
        content = _UNESCAPED[quote].match(data, start)
        return content.end() if content is not None and data[content.end() : content.end() + 1] == quote else len(data)
    closing = None
    if (known := next((depth for depth in (1, 3, 7) if slashes <= depth), None)) is not None:
        closing = _ESCAPED[known, quote].search(data, start - 1)
    return len(data) if closing is None else max(start, closing.end() - 1 - slashes)


def _json_end(data: bytes, start: int) -> int:
    """Where an object or an array ends. One that is cut, too long or no JSON ends with the data."""
    text = data[start : start + LONGEST].decode("utf-8", "surrogateescape")
    try:
        _, end = _JSON.raw_decode(text)
    except (ValueError, RecursionError):
        return len(data)
    return start + len(text[:end].encode("utf-8", "surrogateescape"))


Span = tuple[int, int]
"""First byte, and the byte after the last. Nothing if they are one."""

STRETCH = 4 * LONGEST
"""How many bytes a person's pattern sees at once."""

_FREE_INSTRUCTIONS = 100
_SIMULATED_AT_A_PLACE = 1 << 15
"""Instructions times bytes."""

MAX_PLACES = 20_000
"""Places that are looked at closely in one text or document, at some ten microseconds each."""

MAX_VALUES = 100_000
"""Texts, names, objects and arrays that are copied in one document, at some microseconds each."""


class TooMuchWorkError(Exception):
    """So many places may be secrets that it would take too long to look at each."""


class Work:
    """What may still be done for one text or document."""

    __slots__ = ("_places_left", "values_left")

    def __init__(self) -> None:
        self._places_left = MAX_PLACES
        self.values_left = MAX_VALUES

    @property
    def is_spent(self) -> bool:
        """Whether no more places can be looked at."""
        return self._places_left < 0

    def spend(self, places: int = 1) -> None:
        """Raises TooMuchWorkError when all is spent."""
        self._places_left -= places
        if self._places_left < 0:
            raise TooMuchWorkError


@dataclass(frozen=True, slots=True)
class Finder:
    """A built-in pattern, and which part of what it finds must be hidden."""

    pattern: Pattern
    part: Callable[[bytes, RegexMatch], Span]
    needs: bytes = b""
    """What is in any match: to look for it is far cheaper."""

    def spans(self, data: bytes, work: Work) -> Iterator[Span]:
        """What must be hidden, from left to right."""
        position = 0 if self.needs in data else len(data)
        while position < len(data) and (found := self.pattern.search(data, position)) is not None:
            work.spend()
            start, end = self.part(data, found)
            if start < end:
                yield start, end
            position = max(end, found.start() + 1)


@dataclass(frozen=True, slots=True)
class OwnFinder:
    """A pattern that a person wrote. Such as `a(.*z)?` look from each of many matches to the end of what they see.

    So they see stretches of long texts, which overlap by what a secret is at most taken to be long.
    """

    pattern: Pattern

    def spans(self, data: bytes, work: Work) -> Iterator[Span]:
        """What must be hidden, from left to right."""
        spend_for_simulation(self.pattern, data, work)
        position = 0
        while position < len(data):
            seen = min(len(data), position + STRETCH)
            found = self.pattern.search(data, position, seen)
            if found is None:
                position = len(data) if seen == len(data) else seen - LONGEST
            elif found.end() == seen < len(data) and found.start() > position:
                position = found.start()  # it may go on
            else:
                work.spend()
                if found.start() < found.end():
                    yield found.start(), found.end()
                position = max(found.end(), position + 1)


def spend_for_simulation(pattern: Pattern, data: bytes, work: Work) -> None:
    """Pays for what a large pattern of a person costs at worst, when RE2 has to follow each of its instructions."""
    work.spend(max(0, pattern.programsize - _FREE_INSTRUCTIONS) * len(data) // _SIMULATED_AT_A_PLACE)


def _whole(_: bytes, found: RegexMatch) -> Span:
    """All that was found."""
    return found.start(), found.end()


def _user_info(_: bytes, found: RegexMatch) -> Span:
    return found.start() + len("://"), found.end() - len("@")


def _any_form(forms: Iterable[tuple[str, str]]) -> Pattern:
    return built_in(rf"{_FORM_EDGE}(?:{'|'.join(f'(?:{start})(?:{rest})' for start, rest in forms)})")


_FORMS = _any_form(SECRET_FORMS + OTHER_FORMS)
_KEYS = _any_form(SECRET_FORMS)
_FORM_STARTS = rf"{_FORM_EDGE}(?:{'|'.join(start for start, _ in SECRET_FORMS + OTHER_FORMS)})"


NO_KEY_IN_ID = "has the form of a known service's key or token; ids are stored and shown as they are, so choose another"


def holds_key(text: str) -> bool:
    """Whether something in the text has the form of a known service's key or token."""
    return _KEYS.search(text.encode(errors="surrogatepass")) is not None


def _secret_form(data: bytes, found: RegexMatch) -> Span:
    secret = _FORMS.match(data, found.start())
    return (found.start(), found.start()) if secret is None else (secret.start(), secret.end())


def _card_number(data: bytes, found: RegexMatch) -> Span:
    start, end = found.start(), found.end()
    while not data[start : start + 1].isdigit():
        start += 1
    if not re.fullmatch(rb"[0-9][.-]", data[max(0, start - 2) : start]):  # a number's fraction, or the tail of an id
        without_last_group = max(data.rfind(b" ", start, end), data.rfind(b"-", start, end))
        for stop in (end, without_last_group):
            if _is_card_number(data[start:stop]) and not re.match(rb"[A-Za-z0-9]|-[0-9]", data[stop : stop + 2]):
                return start, stop
    return found.start(), found.start()


_VALUES = bytes.maketrans(b"0123456789", bytes(range(10)))
_DOUBLED = bytes.maketrans(bytes(range(10)), bytes(sum(divmod(2 * digit, 10)) for digit in range(10)))


def _is_card_number(printed: bytes) -> bool:
    """Whether these are 13 to 19 digits, of which the last checks the others (Luhn's formula, ISO/IEC 7812-1)."""
    if not 13 <= len(printed) <= 19 + 18:
        return False
    digits = printed.translate(_VALUES, b" -")
    return 13 <= len(digits) <= 19 and (sum(digits[-1::-2]) + sum(digits[-2::-2].translate(_DOUBLED))) % 10 == 0


def _iban(data: bytes, found: RegexMatch) -> Span:
    start, stop = found.start(), found.end()
    while not data[start : start + 2].isupper():
        start += 1
    length = _IBAN_LENGTHS.get(data[start : start + 2].decode(), 0)
    places = [place for place in range(start, stop) if data[place : place + 1].isalnum()]
    if not 0 < length <= len(places):
        return start, start
    end = places[length - 1] + 1
    printed = data[start:end].translate(None, b" -").decode()
    # The remainder of 97 is 1, where A is 10 and Z is 35, and the first four characters come last.
    is_right = int("".join(str(int(char, 36)) for char in printed[4:] + printed[:4])) % 97 == 1
    return (start, end) if is_right and not data[end : end + 1].isalnum() else (start, start)


def _phone(data: bytes, found: RegexMatch) -> Span:
    start, end = found.start(), found.end()
    digits = sum(char in b"0123456789" for char in data[start:end])
    return (start, end) if 7 <= digits <= 15 and not data[end : end + 1].isalnum() else (start, start)


FINDERS = (
    Finder(built_in(_FORM_STARTS), _secret_form),
    Finder(built_in(CARD), _card_number),
    Finder(built_in(EMAIL), _whole, needs=b"@"),
    Finder(built_in(USER_INFO), _user_info, needs=b"://"),
    Finder(built_in(PRIVATE_KEY), _whole, needs=b"-----BEGIN "),
)
STARTS = (_FORM_STARTS, CARD, EMAIL, USER_INFO, PRIVATE_KEY_START)
"""Patterns one of which is in any text that has a secret. They look no farther than they must."""

OPTIONAL_FINDERS: dict[str, tuple[Finder, str]] = {
    "iban": (Finder(built_in(IBAN), _iban), IBAN_START),
    "phone": (Finder(built_in(PHONE), _phone), PHONE),
}
"""Forms that too many harmless texts have, to be switched on, each with how it begins."""
