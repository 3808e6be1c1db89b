"""Collects the tests once, in the process that xdist's workers are forks of: collecting takes each worker 2 s of CPU.

A worker of xdist asks pytest for a configuration, and that for a session that collects. Here it gets both as they were
before the fork, and only does what differs between workers: it captures into files of its own, has a temporary
directory of its own, tells the controller what was collected, and runs what the controller wants.
"""

# pyright: reportPrivateUsage=false, reportAttributeAccessIssue=false, reportUnknownLambdaType=false
from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import _pytest.config
import pytest
from _pytest.config import Config
from _pytest.config import _prepareconfig as prepare_config
from _pytest.main import Session
from _pytest.tmpdir import TempPathFactory
from xdist.remote import setup_config


@dataclass(slots=True)
class Collection:
    """A session that has collected its tests and has run none."""

    config: Config
    session: Session
    plugins: set[Any]
    """Those that know of the session; a worker adds the one that talks to the controller."""


_collections: dict[int, Collection] = {}
"""The one of this process, by the identity of its configuration."""


def collect(arguments: list[str], workers: int) -> None:
    """Collects the tests for workers started with arguments; what can't be collected is left to them to report."""
    os.environ["PYTEST_XDIST_WORKER_COUNT"] = str(workers)
    config = prepare_config(arguments)
    setup_config(config, None)
    config.workerinput = {}  # no controller, whatever the arguments say
    config._do_configure()
    session = Session.from_config(config)
    config.hook.pytest_sessionstart(session=session)
    with suppress(pytest.UsageError):
        config.hook.pytest_collection(session=session)
    _capturing(config).stop_global_capturing()
    if session.items and session.testsfailed == 0:
        _collections[id(config)] = Collection(config, session, config.pluginmanager.get_plugins())
        _pytest.config._prepareconfig = lambda *_: _captured_by_this_process(config)


def _captured_by_this_process(config: Config) -> Config:
    _capturing(config).start_global_capturing()
    _capturing(config).suspend_global_capture()
    return config


def _capturing(config: Config) -> Any:
    return config.pluginmanager.getplugin("capturemanager")


def run(config: Config) -> pytest.ExitCode | None:
    """Runs in a worker what was collected before it was forked; None where nothing was."""
    if (collection := _collections.get(id(config))) is None:
        return None
    session, manager = collection.session, config.pluginmanager
    config._tmp_path_factory = TempPathFactory.from_config(config, _ispytest=True)
    session.exitstatus = pytest.ExitCode.OK
    try:
        for hook in ("pytest_sessionstart", "pytest_collection_finish"):
            manager.subset_hook_caller(hook, collection.plugins)(session=session)
        config.hook.pytest_runtestloop(session=session)
    except (KeyboardInterrupt, pytest.exit.Exception):
        session.exitstatus = pytest.ExitCode.INTERRUPTED
    except BaseException:  # noqa: BLE001  as pytest does
        session.exitstatus = pytest.ExitCode.INTERNAL_ERROR
        config.notify_exception(pytest.ExceptionInfo.from_current(), config.option)
    finally:
        os.chdir(session.startpath)
        config.hook.pytest_sessionfinish(session=session, exitstatus=session.exitstatus)
        config._ensure_unconfigure()
    return pytest.ExitCode(session.exitstatus)
