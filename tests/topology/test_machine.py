"""How much memory can still be had."""

from microparallel.topology import available_memory, total_memory


def test_free_memory_is_the_machine_s_or_the_container_s(tmp_path):
    meminfo = tmp_path / "meminfo"
    assert available_memory(meminfo, tmp_path) is None
    meminfo.write_text("MemTotal:       8000 kB\nMemAvailable:   4000 kB\nHugePages_Total:   0\n")
    assert available_memory(meminfo, tmp_path) == 4000 * 1024
    (tmp_path / "memory.current").write_text("1000000\n")
    (tmp_path / "memory.max").write_text("max\n")
    assert available_memory(meminfo, tmp_path) == 4000 * 1024
    (tmp_path / "memory.max").write_text("3000000\n")
    assert available_memory(meminfo, tmp_path) == 2_000_000


def test_this_machine_says_it():
    assert total_memory() >= available_memory() > 0
