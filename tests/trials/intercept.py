"""System calls of a run, seen and decided one by one from outside, through seccomp's user notification.

Against ``strace --inject``: calls are counted over the whole process, where strace counts each thread for
itself, so that "the k-th" fails once; paths are matched by folder, where ``-P`` knows single paths only; and
anything can be done at a call (an error, a signal, a pause, a change of a file), after which the kernel goes
on with it.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import platform
import select
import socket
import struct
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

#: Calls that take paths or files, on x86-64: name -> (number, arguments). ``p`` is a path, ``d`` the
#: directory that the path after it is relative to, ``f`` a file, ``.`` anything else.
CALLS = {
    "read": (0, "f"),
    "write": (1, "f"),
    "open": (2, "p"),
    "close": (3, "f"),
    "stat": (4, "p"),
    "fstat": (5, "f"),
    "lstat": (6, "p"),
    "mmap": (9, "....f"),
    "pread64": (17, "f"),
    "pwrite64": (18, "f"),
    "readv": (19, "f"),
    "writev": (20, "f"),
    "access": (21, "p"),
    "msync": (26, ""),
    "sendfile": (40, "ff"),
    "flock": (73, "f"),
    "fsync": (74, "f"),
    "fdatasync": (75, "f"),
    "truncate": (76, "p"),
    "ftruncate": (77, "f"),
    "rename": (82, "pp"),
    "mkdir": (83, "p"),
    "rmdir": (84, "p"),
    "link": (86, "pp"),
    "unlink": (87, "p"),
    "readlink": (89, "p"),
    "chmod": (90, "p"),
    "fchmod": (91, "f"),
    "statfs": (137, "p"),
    "fstatfs": (138, "f"),
    "getdents64": (217, "f"),
    "fadvise64": (221, "f"),
    "openat": (257, "dp"),
    "mkdirat": (258, "dp"),
    "newfstatat": (262, "dp"),
    "unlinkat": (263, "dp"),
    "renameat": (264, "dpdp"),
    "linkat": (265, "dpdp"),
    "readlinkat": (267, "dp"),
    "fchmodat": (268, "dp"),
    "faccessat": (269, "dp"),
    "sync_file_range": (277, "f"),
    "utimensat": (280, "dp"),
    "fallocate": (285, "f"),
    "preadv": (295, "f"),
    "pwritev": (296, "f"),
    "syncfs": (306, "f"),
    "renameat2": (316, "dpdp"),
    "copy_file_range": (326, "f.f"),
    "preadv2": (327, "f"),
    "pwritev2": (328, "f"),
    "statx": (332, "dp"),
    "openat2": (437, "dp"),
    "faccessat2": (439, "dp"),
    "fchmodat2": (452, "dp"),
}
_BY_NUMBER = {number: (name, arguments) for name, (number, arguments) in CALLS.items()}

_AUDIT_ARCH_X86_64 = 0xC000003E
_SECCOMP_CALL, _SET_MODE_FILTER, _NEW_LISTENER = 317, 1, 8
_RET_ALLOW, _RET_USER_NOTIF, _RET_ERRNO = 0x7FFF0000, 0x7FC00000, 0x50000
_PR_SET_NO_NEW_PRIVS = 38
_NOTIF_RECV, _NOTIF_SEND, _NOTIF_ID_VALID = 0xC0502100, 0xC0182101, 0x40082102
_CONTINUE = 1
_AT_FDCWD = -100
_CLONE_NEWNS, _CLONE_NEWUSER = 0x20000, 0x10000000
_MS_BIND, _MS_REC, _MS_PRIVATE = 4096, 16384, 1 << 18

_libc = ctypes.CDLL(None, use_errno=True)


class _Filter(ctypes.Structure):
    _fields_ = [
        ("code", ctypes.c_uint16),
        ("jt", ctypes.c_uint8),
        ("jf", ctypes.c_uint8),
        ("k", ctypes.c_uint32),
    ]


class _Program(ctypes.Structure):
    _fields_ = [("len", ctypes.c_uint16), ("filter", ctypes.POINTER(_Filter))]


def _checked(result: int, doing: str) -> int:
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{doing}: {os.strerror(code)}")
    return result


def _program(numbers: list[int], answer: int) -> _Program:
    """A filter that answers calls of these numbers so, and lets all others pass."""
    load, equal, give = 0x20, 0x15, 0x06
    code = [
        _Filter(load, 0, 0, 4),  # the architecture
        _Filter(equal, 1, 0, _AUDIT_ARCH_X86_64),
        _Filter(give, 0, 0, _RET_ALLOW),
        _Filter(load, 0, 0, 0),  # the call's number
        *(_Filter(equal, len(numbers) - i, 0, number) for i, number in enumerate(numbers)),
        _Filter(give, 0, 0, _RET_ALLOW),
        _Filter(give, 0, 0, answer),
    ]
    return _Program(len(code), (_Filter * len(code))(*code))


def _filter(program: _Program, flags: int) -> int:
    _checked(_libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "no_new_privs")
    return _checked(_libc.syscall(_SECCOMP_CALL, _SET_MODE_FILTER, flags, ctypes.byref(program)), "seccomp")


def install(report_to: socket.socket) -> None:
    """Lets every call of :data:`CALLS` of this process wait for the supervisor that gets the listener."""
    listener = _filter(_program(sorted(_BY_NUMBER), _RET_USER_NOTIF), _NEW_LISTENER)
    socket.send_fds(report_to, [b"listener"], [listener])
    report_to.close()
    os.close(listener)


def refuse(name: str, code: int) -> None:
    """Has every call of one kind fail in this process from now on: no supervisor is needed, and none slows it
    down."""
    _filter(_program([CALLS[name][0]], _RET_ERRNO | code), 0)


def bind_onto_itself(path: str) -> None:
    """Makes a folder a mount point for this process alone; needs user namespaces, or root."""
    uid, gid = os.getuid(), os.getgid()
    flags = _CLONE_NEWNS if uid == 0 else _CLONE_NEWNS | _CLONE_NEWUSER
    _checked(_libc.unshare(flags), "unshare")
    if uid:
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"{uid} {uid} 1")
        Path("/proc/self/gid_map").write_text(f"{gid} {gid} 1")
    _checked(_libc.mount(None, b"/", None, _MS_REC | _MS_PRIVATE, None), "make mounts private")
    target = os.fsencode(path)
    _checked(_libc.mount(target, target, None, _MS_BIND, None), "bind mount")


@dataclass(frozen=True)
class Call:
    """One call on a path that is watched."""

    #: The system call's name.
    kind: str
    #: Path it is about; for two, the first that is watched.
    path: str
    #: How many watched calls came before, of all kinds and of this kind.
    index: int
    nth: int
    #: Thread that calls, and the six arguments as they lie in its registers.
    thread: int = field(default=0, compare=False)
    arguments: tuple[int, ...] = field(default=(), compare=False)

    def __str__(self) -> str:
        return f"{self.kind} #{self.nth} {self.path}"

    def paths(self) -> list[str]:
        """All paths that it is about, before it is done."""
        return list(_paths(self.thread, CALLS[self.kind][1], self.arguments))

    def memory(self, address: int, size: int) -> bytes:
        """Bytes of the caller's memory, before it is done."""
        with Path(f"/proc/{self.thread}/mem").open("rb", buffering=0) as memory:
            memory.seek(address)
            found = b""
            while len(found) < size:
                found += memory.read(size - len(found)) or _gone(self.thread)
        return found


@dataclass(frozen=True)
class Fail:
    """What a call answers instead of being done."""

    code: int


class Supervisor:
    """Decides on the watched calls of one run, in a thread of its own, until the run ends."""

    def __init__(self, listener: int, folders: list[Path], hook: Callable[[Call], Fail | None]) -> None:
        self._listener = listener
        self._prefixes = [str(f) for f in folders]
        self._hook = hook
        self._seen: Counter[str] = Counter()
        #: An error of the harness itself.
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def join(self) -> None:
        """Waits for the run's last call; raises what went wrong here."""
        self._thread.join()
        if self.error is not None:
            raise self.error

    def _serve(self) -> None:
        poll = select.poll()
        poll.register(self._listener, select.POLLIN)
        try:
            while True:
                events = poll.poll()
                if any(event & select.POLLIN for _, event in events):
                    self._one()
                elif any(event & (select.POLLHUP | select.POLLERR) for _, event in events):
                    return
        except BaseException as error:
            self.error = error
        finally:
            # What still waits gets ENOSYS from the kernel.
            os.close(self._listener)

    def _one(self) -> None:
        notice = bytearray(80)
        try:
            fcntl.ioctl(self._listener, _NOTIF_RECV, notice)
        except OSError as e:
            # The caller died, or a signal took it away, before it was heard.
            if e.errno in (errno.ENOENT, errno.EINTR):
                return
            raise
        identity, tid, _, number, _, _, *arguments = struct.unpack("<QIIiIQ6Q", notice)
        answer = struct.pack("<QqiI", identity, 0, 0, _CONTINUE)
        name, shape = _BY_NUMBER[number]
        path = self._watched(tid, shape, arguments)
        if path is not None:
            counts = sum(self._seen.values()), self._seen[name]
            call = Call(name, path, *counts, tid, tuple(arguments))
            self._seen[name] += 1
            outcome = self._hook(call)
            if outcome is not None:
                answer = struct.pack("<QqiI", identity, 0, -outcome.code, 0)
        try:
            fcntl.ioctl(self._listener, _NOTIF_SEND, bytearray(answer))
        except OSError as e:
            if e.errno != errno.ENOENT:
                raise

    def _watched(self, tid: int, shape: str, arguments: list[int]) -> str | None:
        """The first path of a call that lies in a watched folder."""
        try:
            for path in _paths(tid, shape, arguments):
                if any(path == p or path.startswith(f"{p}/") for p in self._prefixes):
                    return path
        except OSError:
            # A file that is closed, or a caller that is gone.
            return None
        return None


def _paths(tid: int, shape: str, arguments: Iterable[int]) -> Iterator[str]:
    """The paths of a call; of a file that is open, where it lies now."""
    base = _AT_FDCWD
    for what, value in zip(shape, arguments, strict=False):
        number = ctypes.c_int32(value & 0xFFFFFFFF).value
        if what == "d":
            base = number
        elif what == "f":
            yield str(Path(f"/proc/{tid}/fd/{number}").readlink()) if number >= 0 else ""
        elif what == "p":
            path = _text(tid, value)
            if not path.startswith("/"):
                link = "cwd" if base == _AT_FDCWD else f"fd/{base}"
                folder = Path(f"/proc/{tid}/{link}").readlink()
                path = os.path.normpath(folder / path)
            yield path


def _gone(tid: int) -> NoReturn:
    raise ProcessLookupError(f"process {tid} is gone")


def _text(tid: int, address: int) -> str:
    """The string at an address of another process."""
    text = b""
    with Path(f"/proc/{tid}/mem").open("rb", buffering=0) as memory:
        while b"\0" not in text and len(text) < 4096:
            memory.seek(address + len(text))
            # Up to the page's end: the next one may not be there.
            read = memory.read(4096 - (address + len(text)) % 4096)
            text += read or _gone(tid)
    return os.fsdecode(text.split(b"\0", 1)[0])


def unavailable() -> str | None:
    """Why calls cannot be intercepted here; None if they can."""
    if platform.machine() != "x86_64" or platform.system() != "Linux":
        return "system calls are intercepted on Linux on x86-64 only"
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    pid = os.fork()
    if pid == 0:
        try:
            ours.close()
            install(theirs)
        except OSError:
            os._exit(1)
        os._exit(0)
    theirs.close()
    message, fds, _, _ = socket.recv_fds(ours, 64, 1)
    ours.close()
    if message and fds:
        Supervisor(fds[0], [], lambda call: None).join()
    _, status = os.waitpid(pid, 0)
    return None if status == 0 and fds else "seccomp's user notification is not allowed here"
