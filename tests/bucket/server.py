# SPDX-License-Identifier: Apache-2.0
"""A store that speaks as much of S3's protocol as reading takes, over objects in memory. It recomputes every signature, and
does on demand what real ones do on bad days. Rules are what it does to the next requests that match."""
import asyncio
import datetime
import hashlib
import hmac
import re
import threading
import time
import urllib.parse
from xml.sax.saxutils import escape

EMPTY = hashlib.sha256(b"").hexdigest()
UNRESERVED = frozenset(b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-._~")


def quote(text, slash=True):
    return "".join(chr(c) if c in UNRESERVED or (slash and c == 47) else f"%{c:02X}" for c in text.encode())


class Rule:
    """What to do to requests: `kind` "get", "list" or "any"; `act` one of status (with `code`), drop, truncate, stall, garbage,
    wrong_range, expire, ignore_match, more, less; `times` how often (None: always); `key` a part of the key."""

    def __init__(self, act, kind="get", times=1, key="", status=503, code="SlowDown", after=0, headers=()):
        self.act, self.kind, self.times, self.key, self.status, self.code = act, kind, times, key, status, code
        self.after, self.headers, self.hits = after, headers, 0


class Store:
    """The server, on a thread of its own, as a context. `page`: keys of a page; `latency`: seconds before each answer; `rate`: bytes a second of
    each connection (0: as fast as it goes)."""

    def __init__(self, page=1000, latency=0.0, region="us-east-1", anonymous=False, tls=None, verify=True, rate=0):
        self.rate = rate
        self.page, self.latency, self.region, self.anonymous, self.tls, self.verify = page, latency, region, anonymous, tls, verify
        self.keys = {"AKIDEXAMPLE": ("secret/key+with=signs", None)}  # id: (secret, token or None)
        self.expired = set()  # tokens
        self.objects, self.rules, self.log, self.served = {}, [], [], 0  # objects: {bucket: {key: (bytes, etag, mtime)}}
        self.connections = self.open_now = self.most_open = 0
        self.waiting = self.most_waiting = 0  # requests of more than 64 KiB, while the latency passes
        self.lock, self.sorted = threading.Lock(), {}
        self.extra = {}  # path: function(method, headers, body) -> (status, body), for credentials

    def put(self, bucket, key, data, etag=None):
        with self.lock:
            etag = etag or '"' + hashlib.md5(data).hexdigest() + '"'
            self.objects.setdefault(bucket, {})[key] = (data, etag, time.time())
            self.sorted.pop(bucket, None)

    def remove(self, bucket, key):
        with self.lock:
            del self.objects[bucket][key]
            self.sorted.pop(bucket, None)

    def put_folder(self, bucket, prefix, folder):
        import os
        for top, _, names in os.walk(folder, followlinks=True):
            for name in names:
                path = os.path.join(top, name)
                with open(path, "rb") as f:
                    self.put(bucket, prefix + os.path.relpath(path, folder), f.read())

    def rule(self, *args, **kw):
        self.rules.append(Rule(*args, **kw))
        return self.rules[-1]

    def requests(self, kind):
        return [x for x in self.log if x[0] == kind]

    def __enter__(self):
        self.loop, ready = asyncio.new_event_loop(), threading.Event()

        async def start():
            self.server = await asyncio.start_server(self.client, "127.0.0.1", 0, ssl=self.tls, limit=1 << 20)
            self.port = self.server.sockets[0].getsockname()[1]
            ready.set()

        def run():
            asyncio.set_event_loop(self.loop)
            self.loop.create_task(start())
            self.loop.run_forever()

        self.thread = threading.Thread(target=run, daemon=True)
        self.thread.start()
        assert ready.wait(10)
        self.url = f"http{'s' if self.tls else ''}://127.0.0.1:{self.port}"
        return self

    def __exit__(self, *_):
        def stop():
            self.server.close()
            for task in asyncio.all_tasks(self.loop):
                task.cancel()
            self.loop.call_later(0.01, self.loop.stop)
        self.loop.call_soon_threadsafe(stop)
        self.thread.join(10)
        self.loop.close()

    def env(self, **more):
        """The environment of a client that has the first of the keys."""
        import os
        e = {k: v for k, v in os.environ.items() if not k.startswith("AWS_") and not k.lower().endswith("_proxy")}
        name, (secret, token) = next(iter(self.keys.items()))
        e.update(AWS_ACCESS_KEY_ID=name, AWS_SECRET_ACCESS_KEY=secret, AWS_ENDPOINT_URL=self.url, AWS_REGION=self.region,
                 AWS_EC2_METADATA_DISABLED="true", HOME="/nonexistent")
        if token:
            e["AWS_SESSION_TOKEN"] = token
        e.update(more)
        return {k: v for k, v in e.items() if v is not None}

    # ---- one connection ----

    async def client(self, reader, writer):
        self.connections += 1
        self.open_now += 1
        self.most_open = max(self.most_open, self.open_now)
        try:
            while await self.one(reader, writer):
                pass
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.LimitOverrunError, asyncio.CancelledError):
            pass
        finally:
            self.open_now -= 1
            writer.close()

    async def one(self, reader, writer):
        head = await reader.readuntil(b"\r\n\r\n")
        lines = head.decode("latin-1").split("\r\n")
        method, target, _ = lines[0].split(" ")
        headers = {}
        for line in lines[1:]:
            name, _, value = line.partition(":")
            if name:
                headers[name.lower()] = value.strip()
        body = await reader.readexactly(int(headers.get("content-length", 0)))
        target = re.sub("^http://[^/]+", "", target)  # as for a proxy, which servers take, too
        path, _, query = target.partition("?")
        if self.latency:
            m = re.fullmatch(r"bytes=(\d+)-(\d+)", headers.get("range", ""))
            large = bool(m) and int(m[2]) - int(m[1]) >= 64 * 1024
            self.waiting += large
            self.most_waiting = max(self.most_waiting, self.waiting)
            await asyncio.sleep(self.latency)
            self.waiting -= large
        if path in self.extra:
            status, text = self.extra[path](method, headers, body)
            return self.reply(writer, status, text.encode())
        bucket, _, key = urllib.parse.unquote(path)[1:].partition("/")
        kind = "list" if not key else "get"
        fields = urllib.parse.parse_qs(query, keep_blank_values=True)
        self.log.append((kind, bucket, key or fields.get("prefix", [""])[0], headers.get("range", ""), headers))
        rule = self.match(kind, key or fields.get("prefix", [""])[0])
        if rule and rule.act == "status":
            return self.fail(writer, rule.status, rule.code, "as the test wants", rule.headers)
        if rule and rule.act == "drop":
            writer.transport.abort()
            return False
        if rule and rule.act == "stall" and not rule.after:
            await asyncio.sleep(3600)
        if rule and rule.act == "garbage":
            return self.reply(writer, 200, b"<ListBucketResult><Contents><Key>x</Key>")
        problem = self.refuse(method, path, query, headers) if self.verify else None
        if problem:
            return self.fail(writer, *problem)
        if bucket not in self.objects:
            return self.fail(writer, 404, "NoSuchBucket", "The specified bucket does not exist")
        if kind == "list":
            return self.list(writer, bucket, fields)
        return await self.get(writer, bucket, key, headers, rule)

    def match(self, kind, key):
        with self.lock:
            for r in self.rules:
                if r.kind in (kind, "any") and r.key in key and r.times != 0:
                    r.hits += 1
                    if r.times is not None:
                        r.times -= 1
                    return r
        return None

    def reply(self, writer, status, body, headers=(), length=None):
        text = f"HTTP/1.1 {status} X\r\nContent-Length: {len(body) if length is None else length}\r\nServer: test\r\n"
        text += "".join(f"{k}: {v}\r\n" for k, v in headers) + "\r\n"
        writer.write(text.encode() + body)
        return True

    def fail(self, writer, status, code, message, headers=()):
        more = "".join(f"<{k}>{v}</{k}>" for k, v in headers if not k.startswith("x-"))
        body = f'<?xml version="1.0" encoding="UTF-8"?><Error><Code>{code}</Code><Message>{message}</Message>{more}</Error>'
        return self.reply(writer, status, b"" if status == 304 else body.encode(), [h for h in headers if h[0].startswith("x-")])

    # ---- signatures ----

    def refuse(self, method, path, query, headers):
        """What is wrong with a request: (status, code, message), or None."""
        auth = headers.get("authorization")
        if not auth:
            return None if self.anonymous else (403, "AccessDenied", "Access Denied")
        m = re.fullmatch(r"AWS4-HMAC-SHA256 Credential=([^/]+)/(\d{8})/([^/]+)/s3/aws4_request, ?"
                         r"SignedHeaders=([^,]+), ?Signature=([0-9a-f]{64})", auth)
        if not m:
            return 400, "AuthorizationHeaderMalformed", f"not understood: {auth.split('Signature')[0]}"
        who, day, region, names, signature = m.groups()
        if region != self.region:
            return (400, "AuthorizationHeaderMalformed", f"the region '{region}' is wrong; expecting '{self.region}'",
                    [("Region", self.region)])
        if who not in self.keys:
            return 403, "InvalidAccessKeyId", "The AWS Access Key Id you provided does not exist"
        secret, token = self.keys[who]
        if headers.get("x-amz-security-token") in self.expired:
            return 400, "ExpiredToken", "The provided token has expired."
        if headers.get("x-amz-security-token") != token:
            return 403, "InvalidAccessKeyId", "another token"
        stamp = headers.get("x-amz-date", "")
        now = datetime.datetime.now(datetime.timezone.utc)
        if not stamp.startswith(day) or abs((datetime.datetime.strptime(stamp, "%Y%m%dT%H%M%SZ").replace(
                tzinfo=datetime.timezone.utc) - now).total_seconds()) > 900:
            return 403, "RequestTimeTooSkewed", "The difference between the request time and the server's time is too large."
        payload = headers.get("x-amz-content-sha256")
        if payload != ("UNSIGNED-PAYLOAD" if self.tls else EMPTY):
            return 400, "XAmzContentSHA256Mismatch", f"x-amz-content-sha256 is {payload}"
        needed = {"host", "x-amz-content-sha256", "x-amz-date"} | ({"x-amz-security-token"} if token else set())
        if not needed <= set(names.split(";")):
            return 403, "AccessDenied", f"not signed: {needed - set(names.split(';'))}"
        # the canonical request is made of what S3 decodes, not of what was sent
        uri = quote(urllib.parse.unquote(path))
        pairs = sorted((quote(k, False), quote(v, False)) for k, v in urllib.parse.parse_qsl(query, keep_blank_values=True))
        canonical = "\n".join([method, uri, "&".join(f"{k}={v}" for k, v in pairs),
                               *(f"{n}:{' '.join(headers.get(n, '').split())}" for n in names.split(";")), "", names, payload])
        scope = f"{day}/{region}/s3/aws4_request"
        to_sign = "\n".join(["AWS4-HMAC-SHA256", stamp, scope, hashlib.sha256(canonical.encode()).hexdigest()])
        k = ("AWS4" + secret).encode()
        for part in (day, region, "s3", "aws4_request", to_sign):
            k = hmac.new(k, part.encode(), hashlib.sha256).digest()
        if not hmac.compare_digest(k.hex(), signature):
            return 403, "SignatureDoesNotMatch", "The request signature we calculated does not match the signature you provided."
        return None

    # ---- answers ----

    def list(self, writer, bucket, fields):
        prefix, delimiter = fields.get("prefix", [""])[0], fields.get("delimiter", [""])[0]
        token = fields.get("continuation-token", [""])[0]
        code = (lambda s: quote(s).replace("%20", "+")) if fields.get("encoding-type") == ["url"] else escape
        with self.lock:
            keys = self.sorted.get(bucket)
            if keys is None:
                keys = self.sorted[bucket] = sorted(self.objects[bucket], key=str.encode)
        import bisect
        after = token[2:] if token else ""
        at = bisect.bisect_left(keys, prefix)
        if after:
            at = max(at, bisect.bisect_right(keys, after))
        out, n, last, folders = [], 0, "", set()
        while at < len(keys) and keys[at].startswith(prefix) and n < self.page:
            key = keys[at]
            cut = key.find(delimiter, len(prefix)) if delimiter else -1
            if cut >= 0:
                folder = key[:cut + len(delimiter)]
                out.append(f"<CommonPrefixes><Prefix>{code(folder)}</Prefix></CommonPrefixes>")
                at = bisect.bisect_left(keys, folder[:-1] + chr(ord(folder[-1]) + 1))
                last = keys[at - 1]
            else:
                data, etag, mtime = self.objects[bucket][key]
                when = datetime.datetime.fromtimestamp(mtime, datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%S.000Z")
                out.append(f"<Contents><Key>{code(key)}</Key><LastModified>{when}</LastModified><ETag>{escape(etag, {chr(34): '&quot;'})}"
                           f"</ETag><Size>{len(data)}</Size><StorageClass>STANDARD</StorageClass></Contents>")
                last = key
                at += 1
            n += 1
        more = at < len(keys) and keys[at].startswith(prefix)
        text = (f'<?xml version="1.0" encoding="UTF-8"?><ListBucketResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/">'
                f"<Name>{bucket}</Name><Prefix>{code(prefix)}</Prefix><KeyCount>{n}</KeyCount><MaxKeys>1000</MaxKeys>"
                f"<IsTruncated>{'true' if more else 'false'}</IsTruncated>"
                + (f"<NextContinuationToken>{escape('t=' + last)}</NextContinuationToken>" if more else "")
                + ("<EncodingType>url</EncodingType>" if fields.get("encoding-type") == ["url"] else "")
                + "".join(out) + "</ListBucketResult>")
        return self.reply(writer, 200, text.encode())

    async def get(self, writer, bucket, key, headers, rule):
        act = rule.act if rule else ""
        found = self.objects[bucket].get(key)
        if found is None:
            return self.fail(writer, 404, "NoSuchKey", "The specified key does not exist.")
        data, etag, _ = found
        if headers.get("if-match", etag) != etag and act != "ignore_match":
            return self.fail(writer, 412, "PreconditionFailed", "At least one of the pre-conditions you specified did not hold")
        m = re.fullmatch(r"bytes=(\d+)-(\d+)", headers.get("range", ""))
        if not m:
            return self.fail(writer, 400, "InvalidRequest", "this test expects a range")
        a, b = int(m[1]), min(int(m[2]), len(data) - 1)
        if a > b:
            return self.fail(writer, 416, "InvalidRange", "The requested range is not satisfiable")
        part = memoryview(data)[a:b + 1]
        ours = [("ETag", etag), ("Content-Range", f"bytes {a}-{b}/{len(data)}")]
        if act == "wrong_range":
            ours[1] = ("Content-Range", f"bytes {a + 1}-{b + 1}/{len(data)}")
        if act == "whole":
            self.reply(writer, 200, data, ours[:1])
            return True
        if act == "more":
            part = bytes(part) + b"more"
        if act == "less":  # a Content-Length that fits, but not the bytes that were asked for
            return self.reply(writer, 206, bytes(part[:len(part) // 2]), ours)
        self.served += len(part)
        self.reply(writer, 206, b"", ours, len(part))
        if act in ("truncate", "stall"):
            writer.write(part[:rule.after or len(part) // 2])
            await writer.drain()
            if act == "stall":
                await asyncio.sleep(3600)
            writer.transport.close()
            return False
        await self.send(writer, part)
        return True

    async def send(self, writer, part):
        step = 128 * 1024 if self.rate else len(part)
        begin = time.monotonic()
        for at in range(0, len(part), step or 1):
            writer.write(part[at:at + step])
            await writer.drain()
            if self.rate:
                await asyncio.sleep(max(0, begin + (at + step) / self.rate - time.monotonic()))
