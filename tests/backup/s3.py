"""The part of S3's HTTP protocol that backups use, on a free port of loopback, with the objects in memory."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from xml.sax.saxutils import escape, unescape

from aiohttp import web

from breakwater.local.ports import free_port

_XML = "application/xml"


class S3Double:
    """Buckets and their objects, by their names."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.largest_request = 0
        self._uploads: defaultdict[str, dict[int, bytes]] = defaultdict(dict)

    async def handle(self, request: web.Request) -> web.Response:
        """Answers one request."""
        if "AWS4-HMAC-SHA256 Credential=an-id/" not in request.headers.get("Authorization", ""):
            return web.Response(status=403, text="<Error><Code>AccessDenied</Code></Error>", content_type=_XML)
        name, query = request.path.lstrip("/"), request.query
        data = await request.read()
        self.largest_request = max(self.largest_request, len(data))
        match request.method:
            case "PUT" if "partNumber" in query:
                self._uploads[query["uploadId"]][int(query["partNumber"])] = data
                return web.Response(headers={"ETag": f'"part-{query["partNumber"]}"'})
            case "PUT":
                self.objects[name] = data
                return web.Response(headers={"ETag": '"whole"'})
            case "POST" if "delete" in query:
                keys = re.findall(r"<Key>(.*?)</Key>", data.decode())
                for key in keys:
                    self.objects.pop(f"{name.rstrip('/')}/{unescape(key)}", None)
                deleted = "".join(f"<Deleted><Key>{key}</Key></Deleted>" for key in keys)
                return _xml(f"<DeleteResult>{deleted}</DeleteResult>")
            case "POST" if "uploads" in query:
                upload = f"upload-{len(self._uploads)}"
                self._uploads[upload] = {}
                return _xml(
                    f"<InitiateMultipartUploadResult><UploadId>{upload}</UploadId></InitiateMultipartUploadResult>"
                )
            case "POST":
                parts = self._uploads.pop(query["uploadId"])
                self.objects[name] = b"".join(parts[number] for number in sorted(parts))
                return _xml('<CompleteMultipartUploadResult><ETag>"whole"</ETag></CompleteMultipartUploadResult>')
            case "GET" if "list-type" in query:
                return self._list(name.rstrip("/"), query.get("prefix", ""))
            case _ if name in self.objects:
                stored = self.objects[name]
                headers = {"ETag": '"whole"', "Last-Modified": "Mon, 30 Nov 2026 00:00:00 GMT"}
                if request.method == "HEAD":
                    return web.Response(headers={**headers, "Content-Length": str(len(stored))})
                return web.Response(body=stored, headers=headers)
            case _:
                return web.Response(status=404, text="<Error><Code>NoSuchKey</Code></Error>", content_type=_XML)

    def _list(self, bucket: str, prefix: str) -> web.Response:
        listed = "".join(
            f"<Contents><Key>{escape(name.partition('/')[2])}</Key><Size>{len(data)}</Size>"
            "<LastModified>2026-11-30T00:00:00.000Z</LastModified><ETag>&quot;whole&quot;</ETag></Contents>"
            for name, data in sorted(self.objects.items())
            if name.startswith(f"{bucket}/{prefix}")
        )
        return _xml(f"<ListBucketResult><IsTruncated>false</IsTruncated>{listed}</ListBucketResult>")


def _xml(body: str) -> web.Response:
    return web.Response(text=f'<?xml version="1.0" encoding="UTF-8"?>{body}', content_type=_XML)


@asynccontextmanager
async def s3_double() -> AsyncGenerator[tuple[S3Double, str]]:
    """Runs one while the block runs, and yields its URL."""
    double = S3Double()
    app = web.Application(client_max_size=64 * 2**20)
    app.router.add_route("*", "/{name:.*}", double.handle)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    port = free_port()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    try:
        yield double, f"http://127.0.0.1:{port}"
    finally:
        await runner.cleanup()
