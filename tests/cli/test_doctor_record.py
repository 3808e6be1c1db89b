"""What the doctor says of the comparison of ClickHouse with EVENTS."""

from datetime import UTC, datetime, timedelta

import pytest

from breakwater.cli import doctor_checks
from breakwater.cli.doctor import Finding
from breakwater.cli.doctor_checks import record_findings
from breakwater.kernel.nats.lookup import Lookup
from breakwater.kernel.nats.subjects import Stream
from breakwater.local.plane import PlaneLocation
from breakwater.records.log_comparison import LogComparison, save_comparison
from tests.records import samples
from tests.servers import RunningServer
from tests.services.sink.plane import Plane, of_attempt


async def test_it_says_when_they_were_compared_and_warns_of_what_was_lacking_or_is_not_compared(
    own_nats_server: RunningServer, clickhouse_server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = datetime.now(UTC)
    async with (
        samples.new_database(clickhouse_server.url) as analytics,
        Plane.provisioned(own_nats_server, clickhouse_server, analytics) as plane,
    ):
        monkeypatch.setenv("BREAKWATER_NATS_URL", plane.settings.nats_url.get_secret_value())
        monkeypatch.setenv("BREAKWATER_CLICKHOUSE_URL", plane.settings.clickhouse_url.get_secret_value())

        async def found(one: LogComparison | None = None) -> Finding:
            if one is not None:
                log = (await Lookup(lambda: plane.client).facts(Stream.EVENTS)).identity
                await save_comparison(analytics, log, one)
            [finding] = [one async for one in record_findings(PlaneLocation(None))]
            return finding

        assert (await found()).verdict == "ok", "nothing has happened"
        await plane.publish([of_attempt(samples.attempt())])
        assert (await found()).verdict == "ok", "it has just happened"
        monkeypatch.setattr(doctor_checks, "MAX_COMPARISON_LAG", timedelta(0))
        not_yet = await found()
        assert (not_yet.verdict, "last compared: never" in not_yet.text) == ("warn", True)
        whole = await found(LogComparison(settled=0, upto=1, at=now))
        assert (whole.verdict, "up to event 1; no event was missing" in whole.text) == ("ok", True)
        lacking = LogComparison(settled=1, upto=1, lost=3, lost_at=now, at=now)
        filled = await found(lacking)
        assert (filled.verdict, "3 in total, and were stored again" in filled.text) == ("warn", True)
        monkeypatch.setattr(doctor_checks, "LOSS_WARNING_PERIOD", timedelta(0))
        assert (await found()).verdict == "ok", "long ago"
