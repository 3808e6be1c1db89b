"""What is secret without being told: names of fields, and forms of secrets. Data; finders.py and values.py use it."""

from __future__ import annotations

SECRET_ENDINGS = (
    "password", "passwd", "passphrase", "passcode", "pwd", "secret", "secrets", "credential", "credentials",
    "api_key", "access_key", "secret_key", "private_key", "account_key", "signing_key", "encryption_key", "shared_key",
    "access_token", "refresh_token", "auth_token", "api_token", "session_token", "bearer_token", "bot_token",
    "security_token", "csrf_token", "xsrf_token", "authorization", "cookie", "connection_string",
)  # fmt: skip
"""A name that ends in one of these is secret, too: `OPENAI_API_KEY`, `dbPassword`, `Set-Cookie`."""

SECRET_NAMES = (
    "token", "id_token", "private_token", "jwt", "ssn", "social_security_number", "credit_card", "credit_card_number",
    "card_number", "cvv", "cvc",
)  # fmt: skip
"""Secret only as the whole name, so that `input_tokens`, `pad_token` and `token_count` stay."""

COMMON_NAMES = ("auth", "email", "email_address", "phone", "phone_number")
"""Secret as the whole name of a JSON field, and words of any prose: there they count only if quoted or before a `=`.

Telephone numbers are hidden by these names alone. Their form is that of too many harmless numbers.
"""

QUOTED_NAMES = ("key",)
"""Secret as the whole name of a JSON field; in a text only if quoted: `sort(key=len)` is no secret."""

QUERY_NAMES = ("key", "sig", "signature", "x-amz-signature", "x-goog-signature")
"""Secret as a parameter of a URL, whatever they mean elsewhere."""

WHOLE_LINE_NAMES = (b"passphrase", b"cookie")
"""Fields whose values have spaces: in a text without quotes they end with the line."""

HARMLESS_VALUES = frozenset(
    {b"", b"null", b"none", b"nil", b"undefined", b"true", b"false", b"str", b"string", b"bytes", b"int", b"bool"}
)
"""What follows `password:` in type annotations and empty fields."""

# Also behind what escaping leaves of a line break in a text: the n of \\n is no letter of the secret.
EDGE = r"(?:\b|_|\\[abfnrtv])"

SECRET_FORMS = (
    (r"sk-", r"[A-Za-z0-9_-]{16,}"),  # OpenAI, Anthropic and their kin
    (r"[sr]k_(?:live|test)_|whsec_", r"[A-Za-z0-9+/=]{16,}"),  # Stripe, standard webhooks
    (r"AIza", r"[A-Za-z0-9_-]{30,}"),  # Google
    (r"ya29\.|GOCSPX-", r"[A-Za-z0-9_-]{20,}"),  # Google OAuth
    (r"AKIA|ASIA|ABIA|ACCA", r"[A-Z0-9]{16}\b"),  # AWS
    (r"gh[pousr]_|github_pat_", r"[A-Za-z0-9_]{20,}"),  # GitHub
    (r"gl(?:pat|dt|rt|cbt|ptt|ft|oas)-", r"[A-Za-z0-9_.-]{16,}"),  # GitLab
    (r"xox[a-z]-|xapp-", r"[A-Za-z0-9-]{10,}"),  # Slack
    (r"hooks\.slack\.com/", r"(?:services|workflows|triggers)/[A-Za-z0-9/_-]+"),
    (r"discord(?:app)?\.com/api/", r"webhooks/[A-Za-z0-9/_-]+"),
    (r"(?:hf|npm|gsk|r8|dop_v1|shpat)_", r"[A-Za-z0-9]{20,}"),  # Hugging Face, npm, Groq, Replicate and others
    (r"(?:xai|pplx|pypi)-", r"[A-Za-z0-9_-]{20,}"),
    (r"SG\.", r"[A-Za-z0-9_-]{16,}\.[A-Za-z0-9_-]{16,}"),  # SendGrid
    (r"eyJ", r"[A-Za-z0-9_-]{8,}(?:\.[A-Za-z0-9_-]{4,})+"),  # JSON web tokens, also without their signature
    (r"(?i:bearer)[\s+]", r"[\s+]*(?:[A-Za-z._~+/-]*[0-9][A-Za-z0-9._~+/-]*|[A-Za-z._~+/-]{16,})=*"),
    (r"(?i:basic)[\s+]", r"[\s+]*[A-Za-z0-9+/]{8,}={1,2}"),
    (r"[0-9]{3}-[0-9]{2}-[0-9]{4}", r"\b"),  # US social security numbers
)
"""How secrets begin, and how they go on. The first alone is looked for: counting along in every run of letters would
multiply the states of the automaton, and adversarial texts would find them all."""

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
CARD = rf"{EDGE}{ISSUER}(?:[0-9]{{11,}}|[0-9]{{2}}[ -](?:{'|'.join(_GROUPS)}))"
"""What may be a card number: a run of digits, or groups as they are printed on cards."""

ESCAPES = r"%[2-7][0-9A-Fa-f]|\\(?:u00|x)[2-7][0-9A-Fa-f]"
"""ASCII as URLs and JSON escape it."""
