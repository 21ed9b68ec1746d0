"""How programs for accelerators are read, and, where their compilers are, what they may cost."""

import json
import subprocess
import sys

import pytest
from processes import ROOT

TEXT = """\
HloModule jit_step, is_scheduled=true

%f (p: f32[8]) -> f32[8] {
  %p = f32[8]{0} parameter(0)
  ROOT %n = f32[8]{0} negate(%p)
}

%g (p: f32[8,8]) -> f32[8,8] {
  %p = f32[8,8]{1,0} parameter(0)
  ROOT %n = f32[8,8]{1,0} negate(%p)
}

%body.1 (p: f32[8]) -> f32[8] {
  %p = f32[8]{0} parameter(0)
  %a = f32[8]{0} fusion(%p), kind=kLoop, calls=%f
  ROOT %b = f32[8]{0} fusion(%a), kind=kLoop, calls=%f
}

%rare (p: f32[8]) -> f32[8] {
  %p = f32[8]{0} parameter(0)
  ROOT %s = f32[8]{0} sort(%p), dimensions={0}
}

%usual (p: f32[8]) -> f32[8] {
  ROOT %p = f32[8]{0} parameter(0)
}

ENTRY %main (x: f32[8], w: f32[8,8]) -> f32[8] {
  %x = f32[8]{0} parameter(0)
  %w = f32[8,8]{1,0} parameter(1)
  %counted = f32[8]{0} while(%x), body=%body.1, backend_config={"known_trip_count":{"n":"5"}}
  %branch = f32[8]{0} conditional(%i, %x, %x), branch_computations={%rare, %usual}
  %start = (f32[2]{0}, f32[4]{0}) all-gather-start(%branch), dimensions={0}
  %gemm_fusion_dot = f32[8,8]{1,0} fusion(%w), kind=kCustom, calls=%g
  %dot.2 = f32[8,8]{1,0} dot(%w, %w)
  %done = f32[4]{0} all-gather-done(%start)
  %small = (f32[], f32[]) all-reduce-start(%done), to_apply=%add
  %smalldone = f32[] all-reduce-done(%small)
  ROOT %searched = f32[8]{0} while(%x), condition=%c, body=%body.1
}
"""


def test_loops_count_by_their_trips_and_branches_by_the_cheapest(imported):
    hlo = imported("_hlo")
    cost = hlo.Program(TEXT).cost()
    unknown = hlo.UNKNOWN_TRIPS
    # The counted loop, two starts, two products, and the loop of unknown length.
    assert cost.kernels == 5 * 2 + 2 + 2 + unknown * 2
    assert cost.host_syncs == 1 + unknown


TRAFFIC = """\
HloModule jit_f, is_scheduled=true

%put (p: f32[100], i: s32[4], v: f32[4]) -> f32[100] {
  %p = f32[100]{0} parameter(0)
  %i = s32[4]{0} parameter(1)
  %v = f32[4]{0} parameter(2)
  ROOT %s = f32[100]{0} scatter(%p, %i, %v), to_apply=%add
}

%half (p: f32[100], q: f32[100]) -> f32[50] {
  %p = f32[100]{0} parameter(0)
  %q = f32[100]{0} parameter(1)
  %n = f32[100]{0} negate(%p)
  %a = f32[100]{0} add(%n, %q)
  ROOT %s = f32[50]{0} slice(%a), slice={[0:50]}
}

ENTRY %main (x: f32[100], i: s32[4], v: f32[4]) -> f32[50] {
  %x = f32[100]{0} parameter(0)
  %i = s32[4]{0} parameter(1)
  %v = f32[4]{0} parameter(2)
  %copied = f32[100]{0} copy(%x)
  %put_fusion = f32[100]{0} fusion(%x, %i, %v), kind=kInput, calls=%put
  ROOT %half_fusion = f32[50]{0} fusion(%put_fusion, %x), kind=kLoop, calls=%half
}
"""


def test_traffic_is_what_kernels_take_and_put(imported):
    copied, scattered, halved = 2 * 400, 2 * 16 + 16 + 16, 3 * 200
    assert imported("_hlo").Program(TRAFFIC).cost().traffic == copied + scattered + halved


@pytest.mark.slow
def test_kernels_do_not_grow(tmp_path):
    pytest.importorskip("jax_plugins.xla_cuda12")
    command = [sys.executable, "benchmarks/programs.py", "--out", tmp_path]
    subprocess.run(command, check=True, capture_output=True, cwd=ROOT)
    record = json.loads((tmp_path / "h100.json").read_text())
    kernels = {(row["codec"], row["way"]): row["kernels"] for row in record["codecs"]}
    assert kernels["top-k 1 %, 8 bits", "compress"] <= 43
    assert kernels["top-k 1 %, 8 bits", "decompress"] <= 6
    assert kernels["FFT 4096, 5 %, 8 bits", "compress"] <= 45
    assert kernels["FFT 4096, 5 %, 8 bits", "decompress"] <= 13
    assert all(r["host_syncs"] == 0 for r in record["codecs"])
