"""Words of providers that may be stored without their texts, and comparison of model names in answers.

A known word is stored, and only the hash of any other: by its form alone, a word could come from a prompt or be a key.
Providers write a model's name with or without a date and the maker's name, in another order or case; local servers
send a file's path, or a placeholder.
"""

from __future__ import annotations

import hashlib
import re
from functools import lru_cache

from breakwater.dialects.rules.params import KNOWN_PARAMS
from breakwater.jobs.rules.chat_messages import KNOWN_REASONS
from breakwater.kernel.formats import words
from breakwater.prices.rules.price import KNOWN_TERMS

_CODES = words(
    """
    access_denied access_terminated_error account_deactivated account_overdue api_error api_key_expired arrearage
    auth_error authentication_error authorization_error bad_gateway bad_request bad_response billing_error
    billing_hard_limit_reached billing_not_active blocked_by_policy budget_exceeded capacity_exceeded conflict
    conflict_error content_blocked content_filter content_filtered content_policy_violation content_too_large
    context_length_exceeded context_window_exceeded country_not_supported daily_limit_exceeded
    data_inspection_failed deployment_not_found deploymentnotfound empty_array empty_string engine_overloaded
    engine_overloaded_error error exceed_context_size_error exceeded_current_quota_error expired_api_key
    extra_forbidden failed_precondition forbidden gateway_timeout image_parse_error incorrect_api_key
    insufficient_balance insufficient_balance_error insufficient_credits insufficient_permissions insufficient_quota
    insufficient_user_quota integer_above_max_value integer_below_min_value internal internal_error
    internal_server_error invalid_api_key invalid_argument invalid_api_parameter invalid_authentication
    invalid_authentication_error invalid_base64 invalid_error invalid_image invalid_image_format invalid_image_url
    invalid_json invalid_key invalid_model invalid_organization invalid_parameter invalid_parameter_error
    invalid_prompt invalid_request invalid_request_error invalid_schema invalid_token invalid_type invalid_url
    invalid_value json_invalid json_validate_failed limit_burst limit_requests limit_tokens max_tokens_exceeded
    method_not_allowed missing missing_api_key missing_parameter missing_required_parameter
    model_context_window_exceeded model_deactivated model_decommissioned model_error model_loading
    model_not_available model_not_found model_overloaded model_permission_denied model_terms_required no_access
    no_api_key not_found not_found_error not_implemented not_supported_error operation_not_supported
    organization_deactivated organization_restricted out_of_range output_parse_failed overloaded overloaded_error
    parse_error payment_required permission_denied permission-denied permission_denied_error permission_error
    project_not_found provider_error prompt_too_long quota_exceeded quota_exhausted quotaexceeded rate_limit
    rate_limit_error rate_limit_exceeded rate_limit_reached rate_limit_reached_error rate_limited request_cancelled
    request_timeout request_too_large requests resource_exhausted resource_not_found response_error
    responsibleaipolicyviolation safety_violation server_error server_overloaded service_unavailable
    service_unavailable_error spend_limit_reached string_above_max_length string_below_min_length sensitive_content
    string_too_long timeout timeout_error token_expired token_limit_exceeded tokens tokens_exceeded
    tokens_limit_reached too_many_requests tool_use_failed type_error unauthenticated unauthorized unavailable
    unknown unknown_error unknown_model unknown_parameter unknown_url unprocessable_entity
    unprocessable_entity_error unsupported_country_region_territory unsupported_format unsupported_language
    unsupported_media_type unsupported_model unsupported_parameter unsupported_value upstream_error
    usage_limit_reached validation_error value_error wrong_api_format aborted accessdenied accessdeniedexception
    accountoverdueerror allocationquota.freetieronly already_exists authenticationerror badrequesterror clienterror
    conflictexception connectionerror contentpolicyviolationerror contextwindowexceedederror data_loss
    datainspectionfailed deadline_exceeded dependencyfailedexception expiredtokenexception incompletesignature
    internalerror internalerror.algo internalerror.timeout internalfailure internalservererror
    internalserverexception invalidapikey invalidparameter invalidparameter.datainspection invalidrequesterror
    invalidsignatureexception limitexceededexception modelerrorexception modelnotreadyexception modelnotfound
    modelstreamerrorexception modeltimeoutexception notfounderror optinrequired permissiondeniederror ratelimiterror
    ratelimitexceeded requestexpired requesttimeout resourcenotfoundexception servicequotaexceededexception
    servicetoobusy serviceunavailable serviceunavailableerror serviceunavailableexception throttling
    throttling.allocationquota throttling.burstrate throttling.ratequota throttling.user throttlingexception
    toomanyrequests toomanyrequestsexception unauthorizedexception unimplemented unknownoperation
    unprocessableentityerror unrecognizedclientexception validationerror validationexception 1000 1001 1002 1003
    1004 1008 1013 1024 1026 1027 1033 1039 1041 1042 1043 1044 1100 1110 1111 1112 1113 1120 1121 1200 1210 1211
    1212 1213 1214 1215 1220 1221 1222 1230 1231 1234 1261 1300 1301 1302 1303 1304 1305 1308 1309 1310 1311 1313
    2013 2049 2056 20012 20015 30001 30003 30011 50501 50505 50603 50604
    """
)
"""Known codes, in lower case, of model makers, gateways, Google's RPC, AWS and Alibaba; the numbers are those of Zhipu,
MiniMax and SiliconFlow."""
_PLACES = words(
    """
    arguments body cache_control content data detail file function functions id image_url input input_audio
    input_schema json_schema loc message messages name parameters parts prompt properties required role schema
    source strict text tool_call_id tool_calls tool_result tool_use type url value
    """
)
_STATUS = re.compile(r"[1-5]\d\d")


def known_or_hash(word: str) -> str:
    """Returns a provider's code, type, reason or term if it is known, else its hash, such as `#1f2e3d4c`."""
    lowered = word.lower()
    is_known = lowered in _CODES or lowered in KNOWN_REASONS or lowered in KNOWN_TERMS or _STATUS.fullmatch(lowered)
    return word if is_known else short_digest(word)


def known_place(param: str) -> str:
    """Returns a path in a request, such as `messages.0.content`, if all its names are known, else its hash."""
    names = re.split(r"[.\[\]]+", param.strip("]"))
    is_known = all(name in KNOWN_PARAMS or name in _PLACES or name.isdecimal() for name in names)
    return param if is_known else short_digest(param)


def short_digest(text: str) -> str:
    """Returns a short hash of a text, which only reveals whether two texts are equal."""
    return f"#{hashlib.sha256(text.encode(errors='surrogatepass')).hexdigest()[:8]}"


_FILE = re.compile(r"[/.~]|[a-z]:\\|file:|.*\.(gguf|ggml|bin|safetensors|pt|pth|onnx|engine)$", re.I)
"""A path on the server, or the name of a file."""
_ANY = frozenset(
    {"", "any", "base", "default", "dummy", "ensemble", "local", "local-model", "model", "none", "null"}
    | {"test", "test-model", "tgi"}
)
"""Placeholders that servers of a single model use for its name."""
_TOO_SHORT = re.compile(r"[a-z]{1,4}")
_WHERE = re.compile(r"(?:(?:us|eu|apac|au|ca|jp|us-gov|global)\.)?[a-z0-9]+\.(?=[a-z][a-z0-9-]*[-.])")
"""Bedrock's regions and makers: `us.anthropic.claude-…`."""
_VERSION_THERE = re.compile(r"(?:-v\d+)?:\d+(?::\w+)?$")
_DATE = re.compile(r"[-@](20\d\d[-.]?[01]\d[-.]?[0-3]\d|[01]\d[-.][0-3]\d(?:[-.]20\d\d)?|\d{4}|00\d)(?=$|[-:@])")
"""`2025-04-14`, `20241022`, `04-17`, `0613`, `2411`, `002`."""
_TAG = re.compile(r":([\w.-]+)$")
_SAYS_NOTHING = frozenset({"latest", "preview", "exp", "experimental", "meta", "hf", "it", "instruct", "chat"})
_QUANTISED = re.compile(r"(?:fp|bf|int|w)\d+(?:a\d+)?|awq|gptq|gguf|mlx|\d+bit|q\d\w*|nvfp\d|mxfp\d|dynamic")


@lru_cache(maxsize=4096)
def is_same_model(answered: str, requested: tuple[str, ...]) -> bool:
    """Returns True if an answer's model is the requested one. A date or tag that one of the names lacks is ignored.

    Args:
        answered: the name in the answer.
        requested: the names of the requested model.
    """
    if _is_nameless(answered):
        return True
    words, dates, tag = _parts(answered)
    names = [name for name in requested if name]
    for name_words, name_dates, name_tag in map(_parts, names):
        same_dates = not dates or not name_dates or dates == name_dates
        same_tag = not tag or not name_tag or tag == name_tag
        if words == name_words and same_dates and same_tag:
            return True
    return not names or any(map(_is_nameless, names))


def is_placeholder(answered: str) -> bool:
    """Returns True if a name that no price list knows is too short for a model: `m`, `gpt`."""
    return _TOO_SHORT.fullmatch(answered.strip().lower()) is not None


def _is_nameless(name: str) -> bool:
    stripped = name.strip().lower()
    return stripped in _ANY or _FILE.match(stripped) is not None


def _parts(name: str) -> tuple[list[str], str, str]:
    """Splits a model's name into its significant words, sorted, its date as digits, and its tag."""
    name = name.strip().lower().rpartition("/")[2]
    name = _VERSION_THERE.sub("", _WHERE.sub("", name, count=1) if "." in name else name)
    tag = "" if name.startswith("ft:") or (match := _TAG.search(name)) is None else match[1]
    if tag:
        name = name[: -len(tag) - 1]
    dates = "".join(re.sub(r"\D", "", date) for date in _DATE.findall(name))
    words = re.findall(r"[a-z]+\d*[a-z]*|\d+[a-z]*", _DATE.sub("", name))
    significant = sorted(word for word in words if word not in _SAYS_NOTHING and not _QUANTISED.fullmatch(word))
    return significant, dates, "" if tag in ("latest", "free", "nitro", "floor", "beta") else tag
