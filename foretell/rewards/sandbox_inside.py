"""The inside of the sandbox: walls itself in, then loads a program and calls its functions.

It is a script that `rewards.sandbox` starts in a fresh interpreter, and it imports the standard
library alone. What it is to do comes as JSON on standard input: the program, the calls, the limits.
What it has to tell goes through a pipe, a line each: that the walls stand, that the program is
loaded, and each call's value. Nothing that decides about the program is in here: neither what a
call should give, nor who compares.

The walls are the kernel's, so that no code in this process can take them down. A filter of system
calls (seccomp) lets through what an interpreter needs to compute: no sockets, no new processes or
threads, no signals to others. Files are kept away by Landlock, or by a mount namespace that holds
nothing else: readable are the interpreter's libraries, writable is one empty folder. Capabilities
are dropped, so it makes no difference whether it runs as root.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import struct
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

SHOWN = 200  # characters of an error
FULL = (errno.ENOSPC, errno.EFBIG, errno.EDQUOT)  # of a file that may become no longer
ALIKE = 16  # keys of a set or dict that may have one hash
SEVERAL = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}


# --- plain data


def pack_value(value: Any) -> Any:
    """Packs a value as JSON can carry it, with its type. Raises TypeError for what is no plain
    data.

    Numbers, texts and None are themselves; of other types it is a dict with the type's name.
    """
    if value is None or isinstance(value, bool):
        return value
    for plain_type in (int, float, str):
        if isinstance(value, plain_type):
            return plain_type(value)
    if isinstance(value, dict):
        return {"dict": [[pack_value(key), pack_value(element)] for key, element in value.items()]}
    if isinstance(value, bytes):
        return {"bytes": value.hex()}
    for type_name, collection_type in SEVERAL.items():
        if isinstance(value, collection_type):
            return {type_name: [pack_value(element) for element in value]}
    raise TypeError(f"a value of type {type(value).__name__} is no plain data")


def unpack_value(data: Any) -> Any:
    """Unpacks a value. Raises TypeError or ValueError for what `pack_value` does not give."""
    if data is None or isinstance(data, bool | int | float | str):
        return data
    if not isinstance(data, dict) or len(data) != 1:
        raise ValueError("this is no packed value")
    ((type_name, packed_content),) = data.items()
    if type_name == "bytes":
        return bytes.fromhex(packed_content)
    if type_name == "dict":
        pairs = [(unpack_value(key), unpack_value(element)) for key, element in packed_content]
        check_spread([key for key, _ in pairs])
        return dict(pairs)
    if type_name not in SEVERAL or not isinstance(packed_content, list):
        raise ValueError("this is no packed value")
    elements = [unpack_value(element) for element in packed_content]
    if type_name in ("set", "frozenset"):
        check_spread(elements)
    return SEVERAL[type_name](elements)


def check_spread(keys: list[Any]) -> None:
    """Raises ValueError where many keys have one hash, so that each is compared with all others."""
    hash_counts: dict[int, int] = {}
    for key in keys:
        key_hash = hash(key)
        hash_counts[key_hash] = hash_counts.get(key_hash, 0) + 1
        if hash_counts[key_hash] > ALIKE:
            raise ValueError(f"more than {ALIKE} keys have one hash")


# --- system calls

# Of x86_64 and aarch64; None: that machine has another call for it.
PERMITTED: dict[str, tuple[int | None, int | None]] = {
    "read": (0, 63), "write": (1, 64), "close": (3, 57), "stat": (4, None), "fstat": (5, 80),
    "lstat": (6, None), "poll": (7, None), "lseek": (8, 62), "mmap": (9, 222),
    "mprotect": (10, 226), "munmap": (11, 215), "brk": (12, 214), "rt_sigaction": (13, 134),
    "rt_sigprocmask": (14, 135), "rt_sigreturn": (15, 139), "pread64": (17, 67),
    "pwrite64": (18, 68), "readv": (19, 65), "writev": (20, 66), "access": (21, None),
    "pipe": (22, None), "select": (23, None), "sched_yield": (24, 124), "mremap": (25, 216),
    "madvise": (28, 233), "dup": (32, 23), "dup2": (33, None), "nanosleep": (35, 101),
    "getpid": (39, 172), "exit": (60, 93), "uname": (63, 160), "fsync": (74, 82),
    "ftruncate": (77, 46), "getcwd": (79, 17), "rename": (82, None), "unlink": (87, None),
    "gettimeofday": (96, 169), "getrlimit": (97, 163), "getrusage": (98, 165),
    "times": (100, 153), "getuid": (102, 174), "getgid": (104, 176), "geteuid": (107, 175),
    "getegid": (108, 177), "getppid": (110, 173), "sigaltstack": (131, 132),
    "gettid": (186, 178), "time": (201, None), "futex": (202, 98),
    "sched_getaffinity": (204, 123), "getdents64": (217, 61), "restart_syscall": (219, 128),
    "clock_gettime": (228, 113), "clock_getres": (229, 114), "clock_nanosleep": (230, 115),
    "exit_group": (231, 94), "newfstatat": (262, 79), "unlinkat": (263, 35),
    "renameat": (264, 38), "faccessat": (269, 48), "pselect6": (270, 72), "ppoll": (271, 73),
    "set_robust_list": (273, 99), "dup3": (292, 24), "pipe2": (293, 59), "renameat2": (316, 276),
    "getrandom": (318, 278), "statx": (332, 291), "rseq": (334, 293), "faccessat2": (439, 439),
}  # fmt: skip
# Of each machine: its mark in the filter's data, its place above, and calls that are looked into.
MACHINES = {
    "x86_64": (0xC000003E, 0, {"fcntl": 72, "open": 2, "openat": 257, "capset": 126, "pivot": 155}),
    "aarch64": (0xC00000B7, 1, {"fcntl": 25, "openat": 56, "capset": 91, "pivot": 41}),
}
# What fcntl may do: F_DUPFD, F_GETFD, F_SETFD, F_GETFL, F_SETFL, F_DUPFD_CLOEXEC. Others make the
# kernel send signals to any process.
FCNTL = (0, 1, 2, 3, 4, 1030)
O_TRUNC, O_TMPFILE = 0x200, 0x400000  # bits of open; the latter without O_DIRECTORY
ALLOW, REFUSE, KILL = 0x7FFF0000, 0x00050001, 0x80000000  # REFUSE: with EPERM
LOAD, EQUAL, ANY, AND, RETURN = 0x20, 0x15, 0x45, 0x54, 0x06
Instruction = tuple[int, int, int, int]  # code, steps on if true, if false, operand


def load_argument(argument_index: int) -> Instruction:
    """Loads the low half of a call's argument."""
    return (LOAD, 0, 0, 16 + 8 * argument_index)


def seccomp_filter(machine: str) -> list[Instruction]:
    """Lets through what is PERMITTED, looks into fcntl and open, and refuses all others."""
    machine_mark, machine_index, call_numbers = MACHINES[machine]
    instructions = [
        (LOAD, 0, 0, 4),
        (EQUAL, 1, 0, machine_mark),
        (RETURN, 0, 0, KILL),
        (LOAD, 0, 0, 0),
    ]
    for call_number in [machine_numbers[machine_index] for machine_numbers in PERMITTED.values()]:
        if call_number is not None:
            instructions += [(EQUAL, 0, 1, call_number), (RETURN, 0, 0, ALLOW)]
    inspected_calls = [
        (call_numbers["fcntl"], fcntl_rules()),
        (call_numbers["openat"], open_rules(2)),
    ]
    if "open" in call_numbers:
        inspected_calls.append((call_numbers["open"], open_rules(1)))
    for call_number, check_block in inspected_calls:
        instructions += [(EQUAL, 0, len(check_block), call_number), *check_block]
    return [*instructions, (RETURN, 0, 0, REFUSE)]


def fcntl_rules() -> list[Instruction]:
    instructions = [load_argument(1)]
    for command in FCNTL:
        instructions += [(EQUAL, 0, 1, command), (RETURN, 0, 0, ALLOW)]
    return [*instructions, (RETURN, 0, 0, REFUSE)]


def open_rules(argument_index: int) -> list[Instruction]:
    """Refuses to empty a file that is not opened for writing, which older kernels' Landlock does
    not see, the mode 3, which is neither reading nor writing, and files without a name.
    """
    return [
        load_argument(argument_index),
        (ANY, 6, 0, O_TMPFILE),
        (AND, 0, 0, 3),
        (EQUAL, 4, 0, 3),
        (EQUAL, 0, 2, 0),
        load_argument(argument_index),
        (ANY, 1, 0, O_TRUNC),
        (RETURN, 0, 0, ALLOW),
        (RETURN, 0, 0, REFUSE),
    ]


def load_libc() -> Any:
    return ctypes.CDLL(None, use_errno=True)


def check_result(result: int, operation: str) -> int:
    """Returns the result of a call into the C library. Raises OSError where it failed."""
    if result < 0:
        error_number = ctypes.get_errno()
        raise OSError(error_number, f"{operation}: {os.strerror(error_number)}")
    return result


def call_system(operation: str, number: int, *arguments: Any) -> int:
    call_arguments = [
        ctypes.c_long(call_argument) if isinstance(call_argument, int) else call_argument
        for call_argument in arguments
    ]
    return check_result(load_libc().syscall(ctypes.c_long(number), *call_arguments), operation)


def call_prctl(operation: str, option: int, *arguments: Any) -> int:
    call_arguments = [
        ctypes.c_ulong(call_argument) if isinstance(call_argument, int) else call_argument
        for call_argument in arguments
    ]
    call_arguments += [ctypes.c_ulong(0)] * (4 - len(call_arguments))
    return check_result(load_libc().prctl(ctypes.c_int(option), *call_arguments), operation)


def filter_calls(machine: str) -> None:
    filter_code = b"".join(
        struct.pack("HBBI", *instruction) for instruction in seccomp_filter(machine)
    )
    code_buffer = ctypes.create_string_buffer(filter_code, len(filter_code))
    filter_program = struct.pack("HxxxxxxP", len(filter_code) // 8, ctypes.addressof(code_buffer))
    program_buffer = ctypes.create_string_buffer(filter_program, len(filter_program))
    call_prctl("seccomp", 22, 2, ctypes.byref(program_buffer))  # PR_SET_SECCOMP, by a filter


def drop_capabilities(machine: str) -> None:
    capability_header = ctypes.create_string_buffer(struct.pack("Ii", 0x20080522, 0), 8)
    capability_sets = ctypes.create_string_buffer(24)
    number = MACHINES[machine][2]["capset"]
    call_system("capset", number, ctypes.byref(capability_header), ctypes.byref(capability_sets))


# --- files


def library_paths() -> list[str]:
    """Returns the paths that may be read: the standard library, and the folders of the libraries
    that are loaded.
    """
    candidate_paths = [os.path.abspath(path) for path in sys.path if path]
    candidate_paths.append(os.path.join(sys.base_prefix, "lib"))
    with open("/proc/self/maps", encoding="utf-8", errors="surrogateescape") as maps:
        for line in maps:
            path = line.rstrip("\n").partition("/")[2]
            if ".so" in os.path.basename(path):
                candidate_paths.append(os.path.dirname("/" + path))
    candidate_paths.append("/etc/ld.so.cache")
    library_folders: list[str] = []
    for path in sorted(set(candidate_paths)):
        is_below = any(
            path.startswith(library_folder.rstrip("/") + "/") for library_folder in library_folders
        )
        if os.path.exists(path) and not is_below:
            library_folders.append(path)
    return library_folders


READ_FILE, READ_DIR = 1 << 2, 1 << 3
WRITE_FILE, REMOVE_FILE, MAKE_FILE, TRUNCATE = 1 << 1, 1 << 5, 1 << 8, 1 << 14
RIGHTS = (13, 14, 15, 15, 16)  # how many kinds of access Landlock tells apart, by its version


def wall_by_landlock(machine: str, folder: str, space: int) -> None:
    """Leaves access to libraries and to the folder; the space is counted from outside. Names, sizes
    and times of other files can still be asked for.
    """
    version = call_system("Landlock", 444, None, 0, 1)
    all_rights = (1 << RIGHTS[min(version, len(RIGHTS)) - 1]) - 1
    rights_buffer = ctypes.create_string_buffer(struct.pack("Q", all_rights), 8)
    rule_set = call_system("Landlock", 444, ctypes.byref(rights_buffer), 8, 0)
    try:
        for path in library_paths():
            path_rights = READ_FILE | READ_DIR if os.path.isdir(path) else READ_FILE
            _allow_beneath(rule_set, path, path_rights & all_rights)
        folder_rights = READ_FILE | READ_DIR | WRITE_FILE | REMOVE_FILE | MAKE_FILE | TRUNCATE
        _allow_beneath(rule_set, folder, folder_rights & all_rights)
        call_system("Landlock", 446, rule_set, 0)
    finally:
        os.close(rule_set)


def _allow_beneath(rules: int, path: str, rights: int) -> None:
    path_handle = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        rule_buffer = ctypes.create_string_buffer(struct.pack("=Qi", rights, path_handle), 12)
        call_system(f"Landlock at {path}", 445, rules, 1, ctypes.byref(rule_buffer), 0)
    finally:
        os.close(path_handle)


FILES = 256  # that a program may have at once
NEW_MOUNTS, NEW_NETWORK, NEW_USER = 0x00020000, 0x40000000, 0x10000000
READ_ONLY, NO_SUID, NO_DEVICES, REMOUNT, BIND, RECURSIVE, PRIVATE = (
    1,
    2,
    4,
    32,
    4096,
    16384,
    1 << 18,
)
DETACH = 2
# Flags of a mount as statvfs has them and as mount takes them. In a user namespace they must stay.
LASTING = ((2, 2), (4, 4), (8, 8), (1024, 1024), (2048, 2048), (4096, 1 << 21))


def wall_by_namespaces(machine: str, folder: str, space: int) -> None:
    """Moves to a file system that holds libraries and the folder alone, and to no network. The
    folder is memory of so much space, whatever becomes of the files' names.
    """
    uid, gid = os.getuid(), os.getgid()
    if (
        load_libc().unshare(NEW_MOUNTS | NEW_NETWORK) < 0
    ):  # only a privileged one may without the third
        check_result(load_libc().unshare(NEW_MOUNTS | NEW_NETWORK | NEW_USER), "unshare")
        for name, text in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"),
                           ("gid_map", f"{gid} {gid} 1")):  # fmt: skip
            with open(f"/proc/self/{name}", "w", encoding="utf-8") as file:
                file.write(text)
    mount_path(None, "/", None, RECURSIVE | PRIVATE)
    new_root = os.path.join(os.path.dirname(folder), "root")
    mount_path("tmpfs", new_root, "tmpfs", NO_SUID | NO_DEVICES, "size=1m,mode=755")
    for name in os.listdir("/"):  # /lib is a link in most systems
        if os.path.islink(f"/{name}"):
            os.symlink(os.readlink(f"/{name}"), f"{new_root}/{name}")
    for path in library_paths():
        _bind_path(new_root, path, READ_ONLY)
    os.makedirs(new_root + folder)
    mount_options = f"size={space},nr_inodes={FILES},mode=700"
    mount_path("tmpfs", new_root + folder, "tmpfs", NO_SUID | NO_DEVICES, mount_options)
    os.chdir(new_root)
    call_system("pivot_root", MACHINES[machine][2]["pivot"], b".", b".")
    check_result(load_libc().umount2(b".", DETACH), "umount2")
    mount_path(None, "/", None, REMOUNT | BIND | READ_ONLY | NO_SUID | NO_DEVICES)
    os.chdir(folder)


def _bind_path(root: str, path: str, extra_flags: int) -> None:
    """Makes `path` visible below a new root."""
    target_path = root + path
    if os.path.isdir(path):
        os.makedirs(target_path, exist_ok=True)
    else:
        os.makedirs(os.path.dirname(target_path), exist_ok=True)
        with open(target_path, "ab"):
            pass
    mount_path(path, target_path, None, BIND | RECURSIVE)
    mount_flags = os.statvfs(target_path).f_flag
    lasting_flags = sum(flag for bit, flag in LASTING if mount_flags & bit)
    mount_path(
        None, target_path, None, BIND | REMOUNT | NO_SUID | NO_DEVICES | lasting_flags | extra_flags
    )


def mount_path(
    source: str | None, target_path: str, system_type: str | None, flags: int, data: str = ""
) -> None:
    encoded_arguments = [
        None if argument_text is None else os.fsencode(argument_text)
        for argument_text in (source, target_path, system_type)
    ]
    result = load_libc().mount(*encoded_arguments, ctypes.c_ulong(flags), data.encode() or None)
    check_result(result, f"mount at {target_path}")


# The better ones first.
WALLS: dict[str, Callable[[str, str, int], None]] = {
    "namespaces": wall_by_namespaces,
    "landlock": wall_by_landlock,
}


# --- the program


def set_limits(limits: dict[str, int], parent: int) -> None:
    """Sets what the kernel counts. Raises OSError where the parent has gone."""
    import resource

    call_prctl("prctl", 1, 9)  # PR_SET_PDEATHSIG, SIGKILL: it ends with the thread that started it
    if os.getppid() != parent:
        raise ProcessLookupError("the parent has gone")
    resource_limits = {
        resource.RLIMIT_CPU: limits["cpu"],
        resource.RLIMIT_AS: limits["memory"],
        resource.RLIMIT_FSIZE: limits["disk"],
        resource.RLIMIT_NOFILE: 64,
        resource.RLIMIT_NPROC: 0,
        resource.RLIMIT_CORE: 0,
    }
    for name, soft_limit in resource_limits.items():
        # The first signal of too much CPU time can be caught, the second, a second later, cannot.
        hard_limit = soft_limit + 1 if name == resource.RLIMIT_CPU else soft_limit
        resource.setrlimit(name, (soft_limit, hard_limit))


def wall_in(way: str, request: dict[str, Any]) -> None:
    """Walls the process in: from here on it reaches nothing outside. Raises OSError where that
    cannot be had.
    """
    machine = os.uname().machine
    set_limits(request["limits"], request["parent"])
    call_prctl("no_new_privs", 38, 1)  # PR_SET_NO_NEW_PRIVS, without which others may not filter
    WALLS[way](machine, os.getcwd(), request["limits"]["disk"])
    drop_capabilities(machine)
    filter_calls(machine)


def load_program(source: str) -> ModuleType:
    """Loads the program as a module named `program`."""
    import importlib.abc
    import importlib.util

    class Given(importlib.abc.SourceLoader):
        def get_filename(self, fullname: str) -> str:
            return "<program>"

        def get_data(self, path: str | bytes) -> bytes:
            return source.encode()

    module_spec = importlib.util.spec_from_loader("program", Given())
    assert module_spec is not None and module_spec.loader is not None
    module = importlib.util.module_from_spec(module_spec)
    sys.modules["program"] = module
    module_spec.loader.exec_module(module)
    return module


def describe_fault(error: BaseException) -> list[str]:
    """Returns the kind of fault that an error is, and one line about it."""
    kind_by_error = {SyntaxError: "syntax", MemoryError: "memory"}
    fault_kind = next(
        (name for error_type, name in kind_by_error.items() if isinstance(error, error_type)),
        "raised",
    )
    if isinstance(error, OSError) and error.errno in FULL:
        fault_kind = "disk"
    try:
        error_text = " ".join(str(error).split())
    except BaseException:  # even this is the program's code
        error_text = ""
    name = type(error).__name__
    return [fault_kind, (f"{name}: {error_text}" if error_text else name)[:SHOWN]]


def answer_call(module: ModuleType, call: Sequence[Any], max_length: int) -> dict[str, Any]:
    """Calls a function; returns its value, or the fault."""
    name, args, keyword_args = call
    function: Any = module
    for name_part in name.split("."):
        function = getattr(function, name_part, None)
    if not callable(function):
        return {"fault": ["missing", f"there is no function {name}"]}
    try:
        value = function(*unpack_value(args), **unpack_value(keyword_args))
    except BaseException as error:  # SystemExit is no way out
        return {"fault": describe_fault(error)}
    try:
        packed_answer = {"value": pack_value(value)}
        answer_length = len(json.dumps(packed_answer))
    except BaseException as error:
        return {"fault": ["opaque", describe_fault(error)[1]]}
    return (
        packed_answer
        if answer_length <= max_length
        else {"fault": ["opaque", "the value is too long to compare"]}
    )


def serve_request(way: str, pipe: int) -> None:
    request = json.loads(sys.stdin.buffer.read())
    null_device = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null_device, 0)
    os.close(null_device)

    def tell(**line: Any) -> None:
        os.write(pipe, json.dumps(line).encode() + b"\n")

    try:
        wall_in(way, request)
    except OSError as error:
        tell(refused=str(error.strerror or error))
        return
    tell(ready=True)
    try:
        module = load_program(request["program"])
    except BaseException as error:
        tell(fault=describe_fault(error))
        return
    tell(loaded=True)
    for number, call in enumerate(request["calls"]):
        tell(call=number, **answer_call(module, call, request["limits"]["answer"]))


if __name__ == "__main__":
    try:
        serve_request(sys.argv[1], int(sys.argv[2]))
        sys.stdout.flush()
    finally:
        os._exit(0)  # nothing that the program has left for the end is run
