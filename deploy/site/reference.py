"""The reference, made from the code: each page as Markdown."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from breakwater.cli.commands.contract import config_schema
from breakwater.cli.main import every_command
from breakwater.records.channels import CHANNELS, FROM_PROGRAMS
from breakwater.records.migrations import VIEWS
from breakwater.records.schema import TABLES
from breakwater.records.schemas import message_schemas
from breakwater.services.request.openapi import document

Schema = Mapping[str, Any]


def pages() -> dict[str, str]:
    """The text of each page, by its name."""
    made: dict[str, Callable[[], Iterable[str]]] = {
        "config": _config,
        "commands": _commands,
        "http": _http,
        "subjects": _subjects,
        "sql": _sql,
    }
    return {f"{name}.md": "\n\n".join(make()) + "\n" for name, make in made.items()}


def _config() -> Iterator[str]:
    schema = config_schema()
    yield "# Config file"
    yield (
        "Every field of `breakwater.yaml`, as `breakwater config check` reads it. [How it is written]"
        "(../docs/config.md) explains the parts; [the JSON schema](../proto/breakwater.schema.json) completes it in an "
        "editor."
    )
    yield "## The file"
    yield _fields(schema)
    yield from _shapes(schema["$defs"])


def commands() -> Iterator[tuple[str, Any]]:
    """Every command as it is typed, groups before what is in them."""
    waiting: list[tuple[str, Any]] = [("breakwater", every_command())]
    while waiting:
        path, command = waiting.pop(0)
        inner = [(f"{path} {name}", one) for name, one in getattr(command, "commands", {}).items() if not one.hidden]
        waiting = [*inner, *waiting]
        if path != "breakwater":
            yield path, command


def _commands() -> Iterator[str]:
    yield "# Command line"
    yield "What `--help` says of every command. [How it is used](../docs/commands.md) shows the first ones to know."
    for path, command in commands():
        yield f"{'#' * path.count(' ')}# `{path}`"
        yield _help(command.help or "")
        yield _table(("option", "default", "what"), [_option(one) for one in command.params if not one.hidden])


def _help(text: str) -> str:
    """A command's help: what is indented is an example."""
    parts = [part for part in text.split("\n\n") if part.strip()]
    return "\n\n".join(f"```sh\n{part.strip()}\n```" if part.startswith("    ") else part for part in parts)


def _option(parameter: Any) -> tuple[str, str, str]:
    value = parameter.metavar or parameter.name.upper()
    names = [*parameter.opts, *parameter.secondary_opts]
    if parameter.param_type_name == "argument":
        names = [value]
    elif not parameter.is_flag:
        names = [*names[:-1], f"{names[-1]} {value}"]
    default = getattr(parameter.default, "value", parameter.default)
    shown = "" if default in (None, False, (), []) or callable(default) else f"`{default}`"
    return ", ".join(f"`{name}`" for name in names), shown, parameter.help or ""


def _http() -> Iterator[str]:
    api = document()
    yield "# HTTP API"
    yield api["info"]["description"]
    yield (
        "Every request but those for health has a key: `Authorization: Bearer KEY`. The same as "
        "[OpenAPI 3.1](../proto/openapi.json), for tools."
    )
    for tag in api["tags"]:
        yield f"## {tag['name'].capitalize().replace('Openai', 'OpenAI')}"
        yield tag.get("description", "")
        for path, methods in api["paths"].items():
            for method, operation in methods.items():
                if tag["name"] in operation["tags"]:
                    yield from _operation(f"{method.upper()} {path}", operation)
    yield from _shapes(api["components"]["schemas"], heading="Shapes")


def _operation(route: str, operation: Schema) -> Iterator[str]:
    yield f"### {operation['summary']}"
    yield f"`{route}`"
    yield operation.get("description", "")
    if parameters := operation.get("parameters"):
        yield _table(
            ("parameter", "type", "what"),
            [
                (f"`{one['name']}` in {one['in']}", _type(one["schema"]), one.get("description", ""))
                for one in parameters
            ],
        )
    if body := operation.get("requestBody"):
        yield from _content("Request", body["content"])
    answers: list[tuple[str, str, str]] = []
    for status, response in operation["responses"].items():
        bodies = [_type(content["schema"]) for content in response.get("content", {}).values() if "schema" in content]
        answers.append((status, ", ".join(dict.fromkeys(bodies)), response["description"]))
    yield _table(("response", "body", "when"), answers)
    for status, response in operation["responses"].items():
        yield from _examples(f"Response {status}", response.get("content", {}))


def _content(title: str, content: Schema) -> Iterator[str]:
    for kind, body in content.items():
        yield f"{title}: {_type(body['schema'])} as `{kind}`."
    yield from _examples(title, content)


def _examples(title: str, content: Schema) -> Iterator[str]:
    for kind, body in content.items():
        for name, example in body.get("examples", {}).items():
            value = example["value"]
            text = value if isinstance(value, str) else json.dumps(value, indent=2, ensure_ascii=False)
            yield f"{title}, {name}:"
            yield f"```{'json' if kind.endswith('json') else 'text'}\n{text.strip()}\n```"


def _subjects() -> Iterator[str]:
    yield "# Subjects and messages"
    yield (
        "[In short](../docs/subjects.md). A parameter stands in a subject percent-encoded, dots included. "
        "[AsyncAPI](../proto/asyncapi.yaml) and a JSON schema of each message are for tools."
    )
    for channel in CHANNELS:
        yield f"## `{channel.address}`"
        kept = "not stored" if channel.stream is None else f"in the stream {channel.stream.value}"
        does = "reads" if channel in FROM_PROGRAMS else "writes"
        message = channel.message.__name__
        yield f"Breakwater {does} it; {kept}. The message is a [{message}](#{message.lower()})."
        yield channel.summary
        yield _table(("parameter", "what"), [(f"`{name}`", what) for name, what in channel.parameters.items()])
    shapes: dict[str, Schema] = {}
    for name, schema in message_schemas().items():
        shapes[name] = schema
        shapes.update(schema.get("$defs", {}))
    yield from _shapes(shapes, heading="Messages")


def _sql() -> Iterator[str]:
    yield "# Tables and views"
    yield (
        "What ClickHouse holds, in the database `breakwater`. [Questions and their queries](../docs/analytics.md) show "
        "how it is read: always with `FINAL`, as a row that was delivered twice is replaced when parts are merged."
    )
    for table in TABLES:
        yield f"## `{table.name}`"
        yield f"One row per `{', '.join(table.order_by)}`; its age is that of `{table.time}`."
        columns = [(f"`{name}`", f"`{kind}`", "") for name, kind in table.columns.items()]
        columns += [(f"`{name}`", f"`{kind}`", f"`{sql}`") for name, (kind, sql) in table.computed.items()]
        yield _table(("column", "type", "computed"), columns)
    yield "## Views"
    for name, select in VIEWS.items():
        yield f"### `{name}`"
        yield f"```sql\n{select.strip()}\n```"


def _shapes(schemas: Mapping[str, Schema], *, heading: str = "Parts") -> Iterator[str]:
    """Sections for the named parts of a schema, which `_type` links to."""
    yield f"## {heading}"
    for name, schema in sorted(schemas.items()):
        yield f"### {name}"
        yield schema.get("description", "")
        yield _fields(schema) if "properties" in schema else f"Is {_type(schema)}."


def _fields(schema: Schema) -> str:
    required = schema.get("required", ())
    rows = [
        (
            f"`{name}`",
            _type(field),
            "required" if name in required else _default(field),
            field.get("description", ""),
        )
        for name, field in schema["properties"].items()
    ]
    return _table(("field", "type", "default", "what"), rows)


def _default(field: Schema) -> str:
    value = field.get("default")
    return "" if value in (None, [], {}) or isinstance(value, dict) else f"`{json.dumps(value, ensure_ascii=False)}`"


def _type(schema: Schema | bool) -> str:
    """A type in words; those with a name link to their section."""
    if isinstance(schema, bool) or not schema:
        return "any JSON"
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return f"[{name}](#{name.lower()})"
    for several in ("anyOf", "oneOf"):
        if several in schema and "properties" not in schema:
            return " or ".join(dict.fromkeys(_type(one) for one in schema[several]))
    if "enum" in schema or "const" in schema:
        values = schema.get("enum", [schema.get("const")])
        return ", ".join(f"`{json.dumps(value, ensure_ascii=False)}`" for value in values)
    kind = schema.get("type", "any JSON")
    if kind == "array":
        return f"list of {_type(schema.get('items', {}))}"
    if kind == "object":
        inner = schema.get("additionalProperties") or next(iter(schema.get("patternProperties", {}).values()), {})
        return f"map of names to {_type(inner)}" if inner not in ({}, True, False) else "object"
    return f"{kind if isinstance(kind, str) else ' or '.join(kind)}{_bounds(schema)}"


def _bounds(schema: Schema) -> str:
    signs = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}
    bounds = [f"{sign} {schema[name]:g}" for name, sign in signs.items() if name in schema]
    if "maxLength" in schema:
        bounds.append(f"at most {schema['maxLength']} characters")
    return f", {', '.join(bounds)}" if bounds else ""


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table, without the columns that are empty in every row; nothing where there are no rows."""
    used = [at for at in range(len(head)) if any(row[at] for row in rows)]
    lines = [[head[at] for at in used], ["---"] * len(used), *([_cell(row[at]) for at in used] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) if rows else ""


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")
