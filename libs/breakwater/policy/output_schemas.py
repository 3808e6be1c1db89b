"""Ready-made JSON schemas for answers, which agents may name."""

from __future__ import annotations

from collections.abc import Mapping

from pydantic import JsonValue

Schema = dict[str, JsonValue]


def ready_schemas() -> Mapping[str, Schema]:
    """The schemas by name."""
    return {"task_result": _task_result(), "agent_decision": _agent_decision()}


def _task_result() -> Schema:
    return {
        "title": "task_result",
        "description": "What came of a task.",
        "type": "object",
        "properties": {
            "status": {
                "description": "success: all is done; partial: a part is done; failure: nothing usable came of it.",
                "enum": ["success", "partial", "failure"],
            },
            "summary": {
                "description": "What was done and what came of it, in a few sentences that stand for themselves.",
                "type": "string",
                "minLength": 1,
            },
            "result": {"description": "What was asked for, in whatever form the task calls for."},
            "artifacts": {
                "description": "What was made or changed along the way: files, pages, records.",
                "type": "array",
                "items": {
                    "type": "object",
                    "properties": {
                        "name": {"description": "What it is called.", "type": "string", "minLength": 1},
                        "uri": {"description": "Where it is: a path or an address.", "type": "string"},
                        "description": {"description": "What it is for.", "type": "string"},
                    },
                    "required": ["name"],
                },
            },
            "errors": {
                "description": "What went wrong; empty or left out where all is well.",
                "type": "array",
                "items": {
                    "type": "object",
                    "properties": {
                        "message": {
                            "description": "What happened, and what could be done about it.",
                            "type": "string",
                            "minLength": 1,
                        },
                        "code": {"description": "A short name for this kind of error.", "type": "string"},
                        "recoverable": {"description": "Whether trying again can help.", "type": "boolean"},
                    },
                    "required": ["message"],
                },
            },
        },
        "required": ["status", "summary"],
    }


def _agent_decision() -> Schema:
    confidence: Schema = {
        "description": "How sure you are that this is right, from 0 (a guess) to 1 (certain).",
        "type": "number",
        "minimum": 0,
        "maximum": 1,
    }
    return {
        "title": "agent_decision",
        "description": "What to do next, and why.",
        "type": "object",
        "properties": {
            "action": {"description": "The name of what is to be done.", "type": "string", "minLength": 1},
            "reasoning": {"description": "Why this and nothing else, in short.", "type": "string"},
            "confidence": confidence,
            "arguments": {
                "description": "What the action is to be done with, by name.",
                "type": "object",
                "additionalProperties": True,
            },
            "alternatives": {
                "description": "What else was considered, the best first.",
                "type": "array",
                "items": {
                    "type": "object",
                    "properties": {
                        "action": {"description": "The name of the action.", "type": "string", "minLength": 1},
                        "reasoning": {"description": "Why it was not chosen.", "type": "string"},
                        "confidence": dict(confidence),
                    },
                    "required": ["action"],
                },
            },
        },
        "required": ["action", "reasoning", "confidence"],
    }
