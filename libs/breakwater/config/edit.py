"""Changes settings in the text of a config, and leaves its comments and its order as they are."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, cast

import yaml

from breakwater.config.load import read_yaml
from breakwater.kernel.errors import ConfigError

SettingPath = tuple[str, ...]
"""A setting by the names of the mappings around it, and by places in lists: `("agents", "writer", "timeout_s")`."""


def with_settings(text: str, settings: Mapping[SettingPath, object]) -> str:
    """Returns the text of a config with other values of some settings.

    A setting that the text lacks is written below the others of its section, and a list in another order keeps its
    form and the comments of its items.

    Raises:
        ConfigError: a setting can't be changed alone, as an alias shares it or its section is no mapping; or the text
            is not YAML.
    """
    for path, value in settings.items():
        try:
            _, document = read_yaml(text)
            root = yaml.compose(text, Loader=yaml.CSafeLoader)  # as it is written: without merged keys
            text = _apply(text, _edits(text, root, path, value))
            _, changed = read_yaml(text)
        except yaml.YAMLError:
            changed = document = None
        if document is None or changed != _with_value(document, path, value):
            place = ".".join(path)
            raise ConfigError(f"{place}: can't be changed alone in this file; set it to {flow_text(value)} yourself")
    return text


def flow_text(value: object) -> str:
    """Returns a value as one line of YAML."""
    if isinstance(value, str) and not value.isprintable():
        return json.dumps(value)  # PyYAML would write several lines
    text = yaml.safe_dump(value, default_flow_style=True, width=10_000, allow_unicode=True)
    return text.removesuffix("\n").removesuffix("\n...")


class _Edit(NamedTuple):
    """A part of a text, from one index to another, and the text that replaces it."""

    begin: int
    end: int
    text: str


def _apply(text: str, edits: Sequence[_Edit]) -> str:
    for edit in sorted(edits, reverse=True):
        text = text[: edit.begin] + edit.text + text[edit.end :]
    return text


def _edits(text: str, root: yaml.Node | None, path: SettingPath, value: object) -> Sequence[_Edit]:
    """Returns the edits that set a value; none if there is no place for it."""
    node = root
    for depth, name in enumerate(path):
        if isinstance(node, yaml.SequenceNode) and name.isdecimal() and int(name) < len(node.value):
            node = node.value[int(name)]
            continue
        if not isinstance(node, yaml.MappingNode):
            return ()
        child = next((inner for key, inner in node.value if key.value == name), None)
        if child is None:
            for inner_name in reversed(path[depth + 1 :]):
                value = {inner_name: value}
            return (_insertion(text, node, f"{flow_text(name)}: {flow_text(value)}"),)
        node = child
    if isinstance(node, yaml.SequenceNode):
        return tuple(_reordered(text, node, cast(list[object], value))) if isinstance(value, list) else ()
    is_value = isinstance(node, yaml.ScalarNode)
    return (_Edit(node.start_mark.index, node.end_mark.index, flow_text(value)),) if is_value else ()


def _insertion(text: str, section: yaml.MappingNode, setting: str) -> _Edit:
    """Returns the edit that writes a setting below the others of its section."""
    if section.flow_style:
        last = len(text[: section.end_mark.index - 1].rstrip())
        return _Edit(last, last, f", {setting}" if section.value else setting)
    line_end = _line_end(text, _content_end(text, section))
    indent = " " * section.value[0][0].start_mark.column
    return _Edit(line_end, line_end, f"\n{indent}{setting}")


def _content_end(text: str, block: yaml.Node) -> int:
    """Returns the index after the last character of a block, which ends for YAML only where the next one begins."""
    node = block
    while isinstance(node, yaml.CollectionNode) and not node.flow_style and node.value:
        last = node.value[-1]
        name, node = last if isinstance(last, tuple) else (last, last)
        if node.start_mark.index < name.start_mark.index:  # an alias, whose node is elsewhere
            return name.end_mark.index
    return len(text[: node.end_mark.index].rstrip())


def _line_end(text: str, index: int) -> int:
    end = text.find("\n", index)
    return len(text) if end < 0 else end


def _reordered(text: str, node: yaml.SequenceNode, wanted: list[object]) -> Iterator[_Edit]:
    """Yields the edits that bring the items of a list into another order, or that replace a list in one line."""
    items: list[yaml.Node] = node.value
    names = [item.value for item in items]
    if sorted(names, key=str) != sorted(wanted, key=str):
        if node.flow_style:
            yield _Edit(node.start_mark.index, node.end_mark.index, flow_text(wanted))
        return
    ends = [item.end_mark.index if node.flow_style else _line_end(text, item.end_mark.index) for item in items]
    texts = {
        name: text[item.start_mark.index : end].rstrip() for name, item, end in zip(names, items, ends, strict=True)
    }
    for item, end, name in zip(items, ends, wanted, strict=True):
        yield _Edit(item.start_mark.index, end, texts[name])


def _with_value(document: Any, path: SettingPath, value: object) -> Any:
    """Returns a document with another value of a setting. What an alias shares of it is changed in this place alone."""
    if not path:
        return value
    if isinstance(document, list) and path[0].isdecimal():
        items = enumerate(cast(list[Any], document))
        return [_with_value(item, path[1:], value) if str(place) == path[0] else item for place, item in items]
    section = cast(dict[str, Any], document) if isinstance(document, dict) else {}
    return {**section, path[0]: _with_value(section.get(path[0]), path[1:], value)}
