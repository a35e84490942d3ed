"""Finding NVIDIA's profilers, asking them, and knowing beforehand what the driver allows."""

from __future__ import annotations

import copy
import pickle
import shutil
from pathlib import Path

import pytest

from nsight_tools.stand_in import write_tool
from trt_engine.profiling.instruments.capture import ProfilerUnavailable
from trt_engine.profiling.instruments.nsight_run import ProcessResult, find_known_failure
from trt_engine.profiling.instruments.nsight_tools import Permission, find_tool, read_permission


@pytest.fixture(autouse=True)
def nothing_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TRT_ENGINE_NSYS", "TRT_ENGINE_NCU"):
        monkeypatch.delenv(name, raising=False)


def machine(root: Path, **places: tuple[int, ...]) -> Path:
    """A root with tools in NVIDIA's folders: `opt_nvidia_nsight-compute_2025.3.1_ncu=(2025, 3, 1, 0)` by file name."""
    for place, version in places.items():
        path = root / place
        write_tool(path.parent, "ncu" if path.name == "ncu" else "nsys", version)
    return root


# ------------------------------------------------------------------------------------------------ where they are


def test_path_comes_before_nvidia_s_folders(tmp_path: Path) -> None:
    root = machine(tmp_path / "root", **{"opt/nvidia/nsight-systems/2026.1.1/bin/nsys": (2026, 1, 1)})
    here = write_tool(tmp_path / "bin", "nsys", (2022, 4, 2, 1))
    found = find_tool("nsys", root=root, path=str(here.parent))
    assert (found.path, found.version, found.label) == (here, (2022, 4, 2, 1), "nsys 2022.4.2")


def test_of_nvidia_s_folders_the_newest_version_wins_by_number_and_not_by_letter(tmp_path: Path) -> None:
    root = machine(
        tmp_path,
        **{
            "opt/nvidia/nsight-compute/2024.10.0/ncu": (2024, 10, 0),
            "opt/nvidia/nsight-compute/2024.9.1/ncu": (2024, 9, 1),
            "usr/local/cuda-13.0/bin/ncu": (2023, 1, 1),
        },
    )
    assert find_tool("ncu", root=root, path="").version == (2024, 10, 0)
    shutil.rmtree(tmp_path / "opt")
    assert find_tool("ncu", root=root, path="").version == (2023, 1, 1)


@pytest.mark.parametrize(
    "place",
    ["opt/nvidia/nsight-systems-cli/2025.1.1/bin/nsys", "opt/nvidia/nsight-systems/2025.1.1/target-linux-x64/nsys"],
)
def test_the_folders_of_other_packages_are_looked_at_too(place: str, tmp_path: Path) -> None:
    assert find_tool("nsys", root=machine(tmp_path, **{place: (2025, 1, 1)}), path="").version == (2025, 1, 1)


def test_a_variable_that_names_nothing_is_an_error_and_not_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = write_tool(tmp_path / "bin", "ncu")
    monkeypatch.setenv("TRT_ENGINE_NCU", str(tmp_path / "nowhere"))
    with pytest.raises(ProfilerUnavailable, match="is not an executable") as refused:
        find_tool("ncu", path=str(other.parent))
    assert "TRT_ENGINE_NCU" in (refused.value.hint or "")


def test_a_launcher_without_what_it_launches_is_passed_over(tmp_path: Path) -> None:
    launcher = write_tool(tmp_path / "bin", "nsys", is_launcher=True)
    root = machine(tmp_path / "root", **{"opt/nvidia/nsight-systems/2024.6.2/bin/nsys": (2024, 6, 2)})
    assert find_tool("nsys", root=root, path=str(launcher.parent)).version == (2024, 6, 2)


def test_none_at_all_says_what_to_install(tmp_path: Path) -> None:
    with pytest.raises(ProfilerUnavailable, match="nsys is not installed") as refused:
        find_tool("nsys", root=tmp_path, path="")
    assert "nsight-systems" in (refused.value.hint or "") and refused.value.exit_code == 3


def test_the_options_of_a_version_are_those_of_its_help(tmp_path: Path) -> None:
    write_tool(tmp_path, "nsys", lacks=["--kill"])
    found = find_tool("nsys", path=str(tmp_path))
    assert "--capture-range-end" in found.options("profile") and "--kill" not in found.options("profile")
    with pytest.raises(ProfilerUnavailable, match="does not know `--kill`"):
        found.require_options(["--kill"], "profile")


def test_the_error_of_the_ladder_survives_a_process_border() -> None:
    error = ProfilerUnavailable("no reason", hint="no fix")
    for again in (copy.copy(error), pickle.loads(pickle.dumps(error))):
        assert (again.message, again.hint, type(again)) == ("no reason", "no fix", ProfilerUnavailable)


# ------------------------------------------------------------------------------------------------ permission


@pytest.mark.parametrize(
    ("params", "held", "expected", "refused"),
    [
        ("RmProfilingAdminOnly: 1\n", "0000000000000000", Permission(True, False), True),
        ("RmProfilingAdminOnly: 1\n", "0000000000200000", Permission(True, True), False),  # CAP_SYS_ADMIN
        ("RmProfilingAdminOnly: 1\n", "0000004000000000", Permission(True, True), False),  # CAP_PERFMON
        ("RmMsg: \nRmProfilingAdminOnly: 0\n", "0000000000000000", Permission(False, False), False),
        (None, "0000000000000000", Permission(None, False), False),
        ("RmProfilingAdminOnly: what\n", "no number", Permission(None, False), False),
    ],
)
def test_the_driver_s_setting_and_the_process_s_rights_tell_a_refusal_beforehand(
    params: str | None, held: str, expected: Permission, refused: bool, tmp_path: Path
) -> None:
    (tmp_path / "proc/driver/nvidia").mkdir(parents=True)
    (tmp_path / "proc/self").mkdir()
    if params is not None:
        (tmp_path / "proc/driver/nvidia/params").write_text(params)
    (tmp_path / "proc/self/status").write_text(f"Name:\tx\nCapEff:\t{held}\n")
    found = read_permission(tmp_path)
    assert found == expected and found.is_refused is refused


# ------------------------------------------------------------------------------------------------ what went wrong


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        ("==ERROR== unrecognised option '--bogus-option'. Use --help", "too old: it does not know `--bogus-option`"),
        (
            "==ERROR== the argument for option '--cache-control' is invalid. Use --help",
            "does not know `--cache-control`",
        ),
        ("the argument ('node') for option '--cuda-graph-trace' is invalid", "does not know `--cuda-graph-trace`"),
        ("==ERROR== ERR_NVGPUCTRPERM - The user does not have permission", "ERR_NVGPUCTRPERM"),
        ("a driver resource was unavailable. Ensure that no other tool", "another profiler holds the GPU's counters"),
        ("==ERROR== Failed to initialize the profiler: LibraryNotLoaded", "cannot be loaded here"),
        ("write error: No space left on device", "the disk is full"),
    ],
)
def test_known_messages_have_a_reason(said: str, reason: str, tmp_path: Path) -> None:
    write_tool(tmp_path, "ncu")
    found = find_known_failure(f"==PROF== Connected\n{said}\n", find_tool("ncu", path=str(tmp_path)))
    assert found is not None and reason in found.message and found.hint
    assert find_known_failure("==PROF== Connected\nall is well\n", find_tool("ncu", path=str(tmp_path))) is None


@pytest.mark.parametrize(
    ("code", "said", "name"),
    [
        (137, "", "SIGKILL"),
        (-9, "", "SIGKILL"),
        (4, "==ERROR== The application returned an error code (4).", "SIGILL"),
        (1, "The target application terminated with signal 11 (SIGSEGV)", "SIGSEGV"),
        (1, "==ERROR== The application returned an error code (1).", None),
        (0, "", None),
    ],
)
def test_the_signal_that_ended_a_program_is_told_by_tool_or_exit_code(code: int, said: str, name: str | None) -> None:
    assert ProcessResult("ncu", code, said, Path("ncu.log")).signal == name
