"""What `breakwater query` writes for spreadsheets."""

from breakwater.kernel.clickhouse.client import Analytics
from tests.cli.conftest import Run, in_thread


async def test_csv_holds_nothing_that_a_spreadsheet_takes_for_a_formula(run: Run, analytics: Analytics) -> None:
    assert analytics.database
    statement = "SELECT '=1+1' AS text, '@x' AS `+name`, '-5' AS number, toDecimal64(-1.5, 2) AS usd, NULL AS nothing"
    ran = await in_thread(run, "query", statement, "--format", "csv")
    assert (ran.code, ran.out) == (0, "text,'+name,number,usd,nothing\n'=1+1,'@x,-5,-1.50,\n")
