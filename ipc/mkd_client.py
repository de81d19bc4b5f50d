#!/usr/bin/env python3
"""Python client of mkd, in one file. Needs pyzmq (Debian: python3-zmq); the wire part alone needs nothing.

    with Client("/run/mkd") as c:
        with c.open(temperature=0.7, seed=1) as s:
            s.append([1, 2, 3])
            for token in s.generate(max_new=64):
                print(token.id, token.logprob)
            print(s.done)

A client has a thread of its own that owns the socket: it answers the daemon's PINGs whatever the program does. Any thread may use a
client; one stream is for one thread at a time, cancel() excepted. Timeouts are in seconds, None waits forever. Errors: Refused (the
daemon's ERR), Closed (the daemon is gone, has restarted or has dropped this client), TimeoutError. PROTOCOL.md is the page to read.

As a program:  python3 mkd_client.py SOCKETDIR --prompt-ids 1,2,3 --max-new 64
"""
import argparse
import collections
import json
import math
import os
import re
import socket
import struct
import sys
import threading
import time

MAGIC, VERSION = 0x57444B4D, 1
MAX_FRAME, CUT, MAX_IDS, MAX_STOP, NO_WINDOW = 1 << 19, 1 << 20, 65536, 16, 0xFFFFFFFF
MOST_BEAT_MS = 60000  # of a daemon: five of them is how long its end goes unnoticed
HEADER = struct.Struct("<IHHIIQQ")
REASONS = ("complete", "length", "stop", "context", "cancelled", "error")
ERRORS = ("OK", "FRAME", "VERSION", "TYPE", "UNSUPPORTED", "HELLO", "REFUSED", "CAPACITY", "DRAINING", "DROPPED", "INTERNAL")

# name: (number, fixed part, items). A field is "name:type" with the types of struct, items is the type of one (None: no items; "s":
# bytes). Where there are items, the last field is their count.
_TABLE = {
    "HELLO": (1, "newest:H reserved:H n:I", "s"),
    "WELCOME": (2, "vocab:I context:I streams:I max_ids:I beat_ms:I beats:I max_frame:I features:I layers:I bos:I pool_tokens:I n_stop:I "
                   "mixer:8I ffn:4I stop:16I temperature:f top_p:f min_p:f top_k:I reserved:I n:I", "s"),
    "OPEN": (3, "context:I window:I seed:Q temperature:f top_p:f min_p:f top_k:I pin:I n:I", "I"),
    "OPENED": (4, "context:I window:I", None),
    "APPEND": (5, "reserved:I n:I", "I"),
    "APPENDED": (6, "position:I appended:I reason:I n:I", "f"),
    "GENERATE": (7, "max_new:I n:I", "I"),
    "TOKENS": (8, "position:I n:I", "QIf"),
    "DONE": (9, "reason:I position:I prompt_tokens:I generated:I queue_ns:Q prompt_ns:Q first_ns:Q total_ns:Q", None),
    "CANCEL": (10, "", None),
    "CLOSE": (11, "", None),
    "CLOSED": (12, "", None),
    "CREDIT": (13, "tokens:I reserved:I", None),
    "STATS": (14, "", None),
    "STATISTICS": (15, "reserved:I n:I", "s"),
    "PING": (16, "cookie:Q", None),
    "PONG": (17, "cookie:Q", None),
    "ERR": (18, "code:H about:H n:I", "s"),
    "FORK": (19, "at:I reserved:I", None),
    "FORKED": (20, "fork:Q position:I how:I replayed:I reserved:I", None),
    "ROLLBACK": (21, "to:I reserved:I", None),
    "ROLLED_BACK": (22, "position:I how:I replayed:I reserved:I", None),
    "CHECKPOINT": (23, "", None),
    "CHECKPOINTED": (24, "position:I how:I replayed:I reserved:I", None),
    "VERIFY": (25, "reserved:I n:I", "I"),
    "VERIFIED": (26, "position:I accepted:I next:I logprob:f device_ns:Q", None),
    "TRACE": (27, "steps:I timeout_ms:I", None),
    "TRACED": (28, "first_step:I steps:I workers:I instructions:I vectors:I n:I", "s"),
    "TRACE_MAP": (29, "first:I n:I", "HBBHHHHI12H"),
    "TRACE_RECORDS": (30, "step:I first:I n:I", "QIIIIII"),
    "INJECT": (31, "what:I worker:I instruction:I after:I", None),
    "INJECTED": (32, "steps:I reserved:I", None),
}
OPEN_SAMPLING, OPEN_STOP, APPEND_LOGPROBS, GENERATE_STOP = 1, 2, 1, 1


class Error(Exception):
    """Base of what this module raises (TimeoutError excepted)."""


class Refused(Error):
    """The daemon's ERR: .code is its name (ERRORS), the text says what was expected and what was found."""

    def __init__(self, code, text):
        super().__init__(text)
        self.code = code


class Closed(Error):
    """The session is over: make a new Client."""


# ---- wire -----------------------------------------------------------------------------------------------------------------


class _Type:
    def __init__(self, name, number, fields, item):
        self.name, self.number = name, number
        pairs = [f.split(":") for f in fields.split()]
        self.fields = [(k, int(t[:-1] or 1)) for k, t in pairs]
        self.fixed = struct.Struct("<" + "".join(t for _, t in pairs))
        self.text = item == "s"
        self.item = struct.Struct("<" + item) if item else None


TYPES = {k: _Type(k, *v) for k, v in _TABLE.items()}
_BY_NUMBER = {t.number: t for t in TYPES.values()}
Message = collections.namedtuple("Message", "name flags stream request fields items")


def encode(name, flags=0, stream=0, request=0, items=(), **fields):
    """A frame. items: bytes for text; otherwise a sequence of numbers, or of tuples where an item has several. Fields default to 0."""
    t = TYPES[name]
    if t.item:
        fields["n"] = len(items)
    values = []
    for key, count in t.fields:
        v = fields.pop(key, 0 if count == 1 else (0,) * count)
        values += [v] if count == 1 else list(v)
    if fields:
        raise ValueError("%s has no field %s" % (name, ", ".join(fields)))
    body = t.fixed.pack(*values)
    if t.text:
        body += bytes(items)
    elif t.item:
        body += b"".join(t.item.pack(*(i if isinstance(i, tuple) else (i,))) for i in items)
    return HEADER.pack(MAGIC, VERSION, t.number, flags, len(body), stream, request) + body


def decode(frame):
    """A Message; ValueError says what is wrong with the frame."""
    if len(frame) < HEADER.size:
        raise ValueError("frame of %d bytes, expected at least %d" % (len(frame), HEADER.size))
    magic, version, number, flags, length, stream, request = HEADER.unpack_from(frame)
    if magic != MAGIC or version != VERSION:
        raise ValueError("magic 0x%08x version %d, expected 0x%08x version %d" % (magic, version, MAGIC, VERSION))
    t = _BY_NUMBER.get(number)
    if t is None:
        raise ValueError("unknown message type %d" % number)
    body = frame[HEADER.size:]
    if length != len(body) or len(body) < t.fixed.size:
        raise ValueError("%s: %d bytes after the header, which says %d" % (t.name, len(body), length))
    flat = list(t.fixed.unpack_from(body))
    fields = {}
    for key, count in t.fields:
        fields[key] = flat.pop(0) if count == 1 else tuple(flat.pop(0) for _ in range(count))
    rest, items = body[t.fixed.size:], ()
    if len(rest) != (t.item.size * fields["n"] if t.item else 0):
        raise ValueError("%s: %d bytes of items, expected %s" % (t.name, len(rest), fields.get("n", 0)))
    if t.text:
        items = bytes(rest)
    elif t.item:
        items = [i[0] if len(i) == 1 else i for i in t.item.iter_unpack(rest)]
    return Message(t.name, flags, stream, request, fields, items)


# ---- client ---------------------------------------------------------------------------------------------------------------

Token = collections.namedtuple("Token", "id logprob position device_ns received")  # received: time.monotonic()
Done = collections.namedtuple("Done", "reason position prompt_tokens generated queue_ns prompt_ns first_ns total_ns")


class Client:
    def __init__(self, directory, name="mkd_client.py", timeout=5.0):
        import zmq

        self._zmq = zmq
        path = os.path.join(directory, "req.sock")
        probe = socket.socket(socket.AF_UNIX)
        try:
            probe.connect(path)
        except OSError as e:
            raise Closed("%s: no mkd listens there: %s" % (path, e)) from None
        finally:
            probe.close()
        self._changed = threading.Condition()
        self._out = collections.deque()
        self._answers = {}  # request -> Message, or None while it is awaited
        self._streams = {}
        self._next = 1
        self._lost = None
        self._quit = False
        self._beat = 1.0
        self._wake_in, self._wake_out = socket.socketpair()
        self._wake_in.setblocking(False)
        self._wake_out.setblocking(False)
        self._context = zmq.Context()
        self._sock = self._context.socket(zmq.DEALER)
        self._sock.setsockopt(zmq.LINGER, 200)
        self._sock.setsockopt(zmq.RCVHWM, 0)
        self._sock.setsockopt(zmq.MAXMSGSIZE, CUT)
        self._sock.connect("ipc://" + path)
        self._thread = threading.Thread(target=self._run, name="mkd-client", daemon=True)
        self._thread.start()
        try:
            m = self._ask("HELLO", "WELCOME", timeout, newest=VERSION, items=name.encode()[:64])
        except BaseException:
            self.close()
            raise
        self.info = dict(m.fields)
        texts = m.items.split(b"\0")
        for i, key in enumerate(("model", "arch", "build", "device")):
            self.info[key] = texts[i].decode("utf-8", "replace") if i < len(texts) else ""
        self.info["stop"] = list(m.fields["stop"][: m.fields["n_stop"]])
        if not self.info["vocab"] or self.info["beat_ms"] > MOST_BEAT_MS:
            self.close()
            raise Error("WELCOME: expected a vocabulary and a beat of at most %d ms, found %d and %d" % (MOST_BEAT_MS, self.info["vocab"], self.info["beat_ms"]))
        with self._changed:
            self._beat = self.info["beat_ms"] / 1000 or 1.0

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        self.close()

    def close(self):
        """Closes the open streams and the session."""
        with self._changed:
            if self._quit:
                return
            if not self._lost:
                for s in self._streams.values():
                    self._out.append(encode("CLOSE", stream=s.id))
            self._quit = True
        self._wake()
        self._thread.join()
        self._context.term()
        self._wake_in.close()
        self._wake_out.close()

    def open(self, context=0, window=4096, temperature=None, top_p=1.0, min_p=0.0, top_k=0, seed=0, stop=None, timeout=5.0):
        """A Stream. temperature None: the model's sampling; stop None: the model's stop ids."""
        flags, sampling = 0, {}
        if temperature is not None:
            flags |= OPEN_SAMPLING
            sampling = dict(temperature=temperature, top_p=top_p, min_p=min_p, top_k=top_k)
        if stop is not None:
            flags |= OPEN_STOP
        m = self._ask("OPEN", "OPENED", timeout, flags=flags, context=context, window=window, seed=seed, items=stop or (), **sampling)
        s = Stream(self, m.stream, m.fields["context"], window)
        with self._changed:
            self._streams[s.id] = s
        return s

    def stats(self, timeout=5.0):
        """The daemon's statistics, a dict."""
        try:
            return json.loads(self._ask("STATS", "STATISTICS", timeout).items)
        except (ValueError, RecursionError):
            raise Error("STATISTICS: expected JSON, found something else") from None

    def ping(self, timeout=5.0):
        """Seconds of one round trip."""
        t = time.monotonic()
        self._ask("PING", "PONG", timeout, cookie=time.monotonic_ns())
        return time.monotonic() - t

    # -- inside

    def _wake(self):
        try:
            self._wake_in.send(b"x")
        except OSError:
            pass  # full: the thread is awake already; closed: it is gone

    def _post(self, frame):
        """With the lock held."""
        if self._lost:
            raise self._lost
        if self._quit:
            raise Closed("this client was closed")
        self._out.append(frame)
        self._wake()

    def _number(self):
        self._next += 1
        return self._next - 1

    def _wait(self, ready, timeout, what):
        """With the lock held: until ready() or the session is lost."""
        if not self._changed.wait_for(lambda: ready() or self._lost, timeout):
            raise TimeoutError("%s: no answer within %g s" % (what, timeout))
        if not ready():
            raise self._lost

    def _ask(self, name, answer, timeout, flags=0, stream=0, items=(), **fields):
        with self._changed:
            request = self._number()
            self._answers[request] = None
            try:
                self._post(encode(name, flags, stream, request, items, **fields))
                self._wait(lambda: self._answers[request] is not None, timeout, name)
                m = self._answers[request]
            finally:
                del self._answers[request]
        if m.name == "ERR":
            raise _refusal(m)
        if m.name != answer:
            raise Closed("%s was answered with %s" % (name, m.name))
        return m

    def _lose(self, why):
        self._lost = self._lost or Closed(why)

    def _dispatch(self, frame):
        try:
            m = decode(frame)
        except ValueError as e:
            return self._lose("mkd sent a bad frame: %s" % e)
        if m.name == "PING":
            return self._out.append(encode("PONG", request=m.request, **m.fields))
        if m.name == "ERR":
            code = ERRORS[m.fields["code"]] if m.fields["code"] < len(ERRORS) else "?"
            if code == "DROPPED" or (code == "HELLO" and m.fields["about"] != TYPES["HELLO"].number):
                return self._lose(m.items.decode("utf-8", "replace"))
        if self._answers.get(m.request, 0) is None:
            self._answers[m.request] = m
        elif m.name == "OPENED":  # whoever asked has given up
            self._out.append(encode("CLOSE", stream=m.stream))
        elif m.stream in self._streams:
            self._streams[m.stream]._take(m)

    def _run(self):
        zmq = self._zmq
        poller = zmq.Poller()
        poller.register(self._wake_out, zmq.POLLIN)
        heard = asked = last = time.monotonic()
        while True:
            with self._changed:
                full = False
                while self._out:
                    try:
                        self._sock.send(self._out[0], zmq.DONTWAIT)
                    except zmq.Again:
                        full = True
                        break
                    self._out.popleft()
                if self._quit:
                    break
                beat = self._beat
            poller.register(self._sock, zmq.POLLIN | (zmq.POLLOUT if full else 0))
            events = dict(poller.poll(beat * 500))
            now = time.monotonic()
            if now - last > 2 * beat:
                heard = now  # this process slept; the daemon did not
            last = now
            if self._wake_out.fileno() in events:
                try:
                    self._wake_out.recv(4096)
                except OSError:
                    pass
            with self._changed:
                for _ in range(64):
                    try:
                        frame = self._sock.recv(zmq.DONTWAIT)
                    except zmq.Again:
                        break
                    heard = now
                    self._dispatch(frame)
                if now - heard >= 5 * beat:
                    self._lose("mkd has not answered for %.1f s" % (now - heard))
                elif now - heard >= beat and now - asked >= beat and not self._lost:
                    asked = now
                    self._out.append(encode("PING", cookie=0))
                self._changed.notify_all()
        self._sock.close()


def _refusal(m):
    code = m.fields["code"]
    name = ERRORS[code] if code < len(ERRORS) else str(code)
    return Refused(name, " ".join(m.items.decode("utf-8", "replace").split()) or name)


class Stream:
    """Made by Client.open. position: tokens in it, as of the last answer; done: the last generation's Done."""

    def __init__(self, client, number, context, window):
        self.client, self.id, self.context, self.window = client, number, context, window
        self.position, self.done = 0, None
        self._consumed = 0
        self._generation, self._over, self._error = 0, True, None
        self._queue = collections.deque()
        self._appends = {}  # request -> ids asked for
        self._logprobs, self._scored = [], False
        self._append_error = None
        self._max_new, self._came, self._expected = 0, 0, None  # of the generation: asked for, received; position of the next token

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        try:
            self.close()
        except (Error, TimeoutError):
            pass

    def append(self, ids, logprobs=False, timeout=None):
        """Adds token ids (any number) and waits until they are processed. With logprobs: the list of the tokens' natural log
        probabilities, NaN for the first token of a stream."""
        c, ids, sent = self.client, list(ids), 0
        self._scored = logprobs
        end = None if timeout is None else time.monotonic() + timeout
        with c._changed:
            self._logprobs = []
            # A message at a time: behind one that was refused the next would land in the wrong place.
            while self._appends or (sent < len(ids) and not self._append_error):
                if not self._appends:
                    part = ids[sent:sent + MAX_IDS]
                    request = c._number()
                    c._post(encode("APPEND", APPEND_LOGPROBS if logprobs else 0, self.id, request, part))
                    self._appends[request] = len(part)
                    sent += len(part)
                else:
                    left = None if end is None else max(0.0, end - time.monotonic())
                    c._wait(lambda: not self._appends, left, "APPEND")
            error, self._append_error = self._append_error, None
            if error:
                raise error
            return self._logprobs if logprobs else None

    def generate(self, max_new, stop=None, timeout=None):
        """Asks for a generation and returns an iterator of its Tokens; .done is set when it ends. timeout: of each token. stop None: the
        stream's stop ids. Breaking off leaves the generation running: cancel() it."""
        c = self.client
        with c._changed:
            request = c._number()
            c._post(encode("GENERATE", 0 if stop is None else GENERATE_STOP, self.id, request, stop or (), max_new=max_new))
            self._grant(len(self._queue))
            self._queue.clear()
            self._generation, self._over, self._error, self.done = request, False, None, None
            self._max_new, self._came, self._expected = max_new, 0, None
        return self._tokens(request, timeout)

    def _tokens(self, request, timeout):
        c = self.client
        while True:
            with c._changed:
                if self._generation != request:
                    return
                c._wait(lambda: self._queue or self._over, timeout, "GENERATE")
                if not self._queue:
                    self._generation = 0
                    if self._error:
                        raise self._error
                    return
                token = self._queue.popleft()
                self._grant(1)
            yield token

    def cancel(self):
        """Ends what runs; the generation's iterator then ends, and done.reason is "cancelled"."""
        with self.client._changed:
            self.client._post(encode("CANCEL", stream=self.id))

    def close(self, timeout=5.0):
        c = self.client
        with c._changed:
            if self.id not in c._streams or c._lost or c._quit:
                return
        try:
            c._ask("CLOSE", "CLOSED", timeout, stream=self.id)
        finally:
            with c._changed:
                c._streams.pop(self.id, None)

    # -- inside, with the client's lock held

    def _grant(self, taken):
        if self.window == NO_WINDOW:
            return
        self._consumed += taken
        if self._consumed and self._consumed >= self.window // 2 and not self.client._lost and not self.client._quit:
            self.client._post(encode("CREDIT", stream=self.id, tokens=self._consumed))
            self._consumed = 0

    def _broken(self, why):
        """The daemon does not keep to the protocol: the generation ends here, whatever else comes of it."""
        self._over, self._error = True, Error(why)
        if not self.client._lost and not self.client._quit:
            self.client._post(encode("CANCEL", stream=self.id))

    def _take(self, m):
        mine = m.request == self._generation and not self._over
        if m.name == "TOKENS":
            if not mine:
                return self._grant(len(m.items))
            at = m.fields["position"]
            if self._expected not in (None, at):
                return self._broken("TOKENS: expected position %d, found %d" % (self._expected, at))
            if self._came + len(m.items) > self._max_new:
                return self._broken("TOKENS: more than the %d tokens that were asked for" % self._max_new)
            self._came += len(m.items)
            self._expected = at + len(m.items)
            now = time.monotonic()
            for i, (device_ns, number, logprob) in enumerate(m.items):
                self._queue.append(Token(number, logprob, m.fields["position"] + i, device_ns, now))
        elif m.name == "DONE":
            self.position = m.fields["position"]
            if mine:
                f = dict(m.fields, reason=REASONS[m.fields["reason"]] if m.fields["reason"] < len(REASONS) else "?")
                self.done, self._over = Done(**f), True
                if self.done.generated != self._came:
                    self._error = Error("DONE: of %d tokens, %d have come" % (self.done.generated, self._came))
        elif m.name == "APPENDED":
            asked = self._appends.pop(m.request, 0)
            self.position = m.fields["position"]
            self._logprobs += m.items
            if m.fields["reason"]:
                self._append_error = Error("append ended early: %d of %d tokens are in" % (m.fields["appended"], asked))
            elif asked and (m.fields["appended"] != asked or len(m.items) != (asked if self._scored else 0)):
                self._append_error = Error("APPENDED: expected %d tokens%s, found %d and %d log probabilities" % (
                    asked, " and as many log probabilities" if self._scored else "", m.fields["appended"], len(m.items)))
        elif m.name == "ERR":
            if mine:
                self._over, self._error = True, _refusal(m)
            elif self._appends.pop(m.request, None) is not None:
                self._append_error = self._append_error or _refusal(m)


# ---- example --------------------------------------------------------------------------------------------------------------


def _quantile(values, q):
    values = sorted(values)
    return values[max(0, math.ceil(q * len(values)) - 1)]


def _natural(bits):
    """What argparse makes of an argument: a whole number of so many bits."""
    def read(text):
        if not re.fullmatch("[0-9]+", text) or int(text) >> bits:
            raise argparse.ArgumentTypeError("expected a whole number below 2^%d, found %r" % (bits, text))
        return int(text)
    return read


def _ids(text):
    return [_natural(32)(i) for i in text.split(",")]


def main():
    p = argparse.ArgumentParser(description="Stream a generation from mkd.")
    p.add_argument("directory", metavar="SOCKETDIR")
    p.add_argument("--prompt-ids", required=True, type=_ids, help="token ids: 1,2,3")
    p.add_argument("--max-new", type=_natural(32), default=64)
    p.add_argument("--temperature", type=float, help="0: greedy; left out: the model's sampling")
    p.add_argument("--seed", type=_natural(64), default=0)
    a = p.parse_args()
    try:
        with Client(a.directory) as c, c.open(temperature=a.temperature, seed=a.seed) as s:
            start, tokens = time.monotonic(), []
            s.append(a.prompt_ids)
            for t in s.generate(a.max_new):
                print(t.id, end=" ", flush=True)
                tokens.append(t)
            print()
            line = "%s: %d tokens" % (s.done.reason, len(tokens))
            if tokens:
                line += ", first after %.2f ms (client clock)" % ((tokens[0].received - start) * 1e3)
            if len(tokens) > 1:
                gaps = [(b.device_ns - a.device_ns) / 1e3 for a, b in zip(tokens, tokens[1:])]
                line += ", between tokens p50 %.1f us, p99 %.1f us (device clock)" % (_quantile(gaps, 0.5), _quantile(gaps, 0.99))
            print(line, file=sys.stderr)
    except (Error, TimeoutError) as e:
        sys.exit("mkd_client.py: %s" % e)
    except ModuleNotFoundError as e:
        sys.exit("mkd_client.py: %s (Debian: apt install python3-zmq)" % e)


if __name__ == "__main__":
    main()
