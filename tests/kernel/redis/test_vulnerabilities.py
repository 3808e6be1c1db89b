from breakwater.kernel.redis.vulnerabilities import RedisServer, known_vulnerabilities, read_version
from tests.tables import each_row

LUA_2024, BUFFERS, LUA_2025 = "CVE-2024-46981", "CVE-2025-21605", "CVE-2025-49844"


@each_row(
    ("server", "version", "holes"),
    [
        ("redis", "6.2.14", (LUA_2024, BUFFERS, LUA_2025)),
        ("redis", "6.2.17", (BUFFERS, LUA_2025)),
        ("redis", "6.2.20", ()),
        ("redis", "7.0.15", (LUA_2024, BUFFERS, LUA_2025)),  # a branch that was given up
        ("redis", "7.4.2", (BUFFERS, LUA_2025)),
        ("redis", "7.4.5", (LUA_2025,)),
        ("redis", "7.4.6", ()),
        ("redis", "8.0.3", (LUA_2025,)),
        ("redis", "8.2.1", (LUA_2025,)),
        ("redis", "8.4.0", ()),
        ("valkey", "7.2.8", (BUFFERS, LUA_2025)),
        ("valkey", "8.0.1", (LUA_2024, BUFFERS, LUA_2025)),
        ("valkey", "8.1.0", (BUFFERS, LUA_2025)),
        ("valkey", "8.1.3", (LUA_2025,)),
        ("valkey", "8.1.10", ()),
        ("valkey", "9.1.2", ()),
        ("valkey", "unknown", (LUA_2024, BUFFERS, LUA_2025)),
    ],
)
def test_the_holes_of_a_release_are_those_that_its_branch_has_not_fixed(
    server: RedisServer, version: str, holes: tuple[str, ...]
) -> None:
    assert known_vulnerabilities(server, read_version(version)) == holes


def test_a_version_is_the_numbers_that_a_text_begins_with() -> None:
    assert read_version("9.0.0-rc3") == (9, 0, 0)
    assert read_version("7.4.6 sha=00000000:0 malloc=libc bits=64") == (7, 4, 6)
    assert read_version("") == read_version("v7") == ()
