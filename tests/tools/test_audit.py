"""The audit reads compiled programs: of a CPU live, of a GPU from their text."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P
from parallel import AXIS, everywhere, mesh_of

import fftgrad as fg

GPU = """\
HloModule jit_step, is_scheduled=true, num_partitions=4

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}

%wrapped_all_to_all (param_0: u32[4,8]) -> u32[4,8] {
  %param_0 = u32[4,8]{1,0} parameter(0)
  ROOT %all-to-all.1 = u32[4,8]{1,0} all-to-all(%param_0), channel_id=3, replica_groups={{0,1,2,3}}, dimensions={0}
}

%dense (arg: (f32[100])) -> (f32[100]) {
  %arg = (f32[100]{0}) parameter(0)
  %g = f32[100]{0} get-tuple-element(%arg), index=0
  %all-reduce-start.1 = f32[100]{0} all-reduce-start(%g), channel_id=1, replica_groups=[1,4]<=[4], use_global_device_ids=true, to_apply=%add, backend_config={"collective_backend_config":{"is_sync":false}}
  %all-reduce-done.1 = f32[100]{0} all-reduce-done(%all-reduce-start.1)
  ROOT %out = (f32[100]{0}) tuple(%all-reduce-done.1)
}

%packed (arg.1: (f32[100])) -> (f32[100]) {
  %arg.1 = (f32[100]{0}) parameter(0)
  %words = u32[1,12]{1,0} fusion(%arg.1), kind=kLoop, calls=%add
  %ag-start = (u32[1,12]{1,0}, u32[4,12]{1,0}) all-gather-start(%words), channel_id=2, replica_groups={{0,1,2,3}}, dimensions={0}
  %ag-done = u32[4,12]{1,0} all-gather-done(%ag-start)
  ROOT %out.1 = (f32[100]{0}) fusion(%ag-done), kind=kLoop, calls=%add
}

%body (state: (s32[], bf16[6])) -> (s32[], bf16[6]) {
  %state = (s32[], bf16[6]{0}) parameter(0)
  %x = bf16[6]{0} get-tuple-element(%state), index=1
  %cp = (bf16[6]{0}, bf16[6]{0}, u32[], u32[]) collective-permute-start(%x), source_target_pairs={{0,1},{1,0}}
  %cp-done = bf16[6]{0} collective-permute-done(%cp)
  ROOT %next = (s32[], bf16[6]{0}) tuple(%cp-done)
}

%cond (state.1: (s32[], bf16[6])) -> pred[] {
  ROOT %go = pred[] constant(false)
}

ENTRY %main (p: f32[100], i: s32[], v: u32[4,8], w: bf16[6]) -> f32[100] {
  %p = f32[100]{0:T(8,128)} parameter(0)
  %i = s32[] parameter(1)
  %v = u32[4,8]{1,0} parameter(2)
  %w = bf16[6]{0} parameter(3)
  %t = (f32[100]{0}) tuple(%p)
  %c = (f32[100]{0}, /*index=1*/f32[2]{0}) conditional(%i, %t, %t), branch_computations={%dense, %packed}
  %pred = pred[] constant(true)
  %d = (f32[100]{0}) conditional(%pred, %t, %t), true_computation=%packed, false_computation=%dense
  %a = ((u32[4,8]{1,0}), u32[4,8]{1,0}) async-start(%v), calls=%wrapped_all_to_all
  %a-done = u32[4,8]{1,0} async-done(%a)
  %s = (s32[], bf16[6]{0}) tuple(%i, %w)
  %l = (s32[], bf16[6]{0}) while(%s), condition=%cond, body=%body
  %pair = (f32[100]{0}, f32[]) all-reduce(%p, %i), channel_id=9, replica_groups={}, to_apply=%add
  ROOT %r = f32[100]{0} get-tuple-element(%c), index=0
}
"""


def test_the_forms_of_a_gpu_program_and_its_bytes_over_a_link():
    assert [c.workers for c in fg.audit(GPU)] == [4, 4, 4, 4, 4, None, None, None]
    found = [(c.kind, c.dtype, c.shape, c.bytes, c.branch, c.repeated) for c in fg.audit(GPU)]
    assert found == [
        ("all-reduce", "f32", (100,), 400, (0,), False),
        ("all-gather", "u32", (1, 12), 48, (1,), False),
        ("all-reduce", "f32", (100,), 400, (0,), False),
        ("all-gather", "u32", (1, 12), 48, (1,), False),
        ("all-to-all", "u32", (4, 8), 128, (), False),
        ("collective-permute", "bf16", (6,), 12, (), True),
        ("all-reduce", "f32", (100,), 400, (), False),
        ("all-reduce", "s32", (), 4, (), False),
    ]
    dense, packed, *_ = fg.audit(GPU)
    assert (dense.link_bytes(4), packed.link_bytes(4)) == (2 * 3 / 4 * 400, 3 * 48)
    assert packed.link_bytes(1) == 0


@pytest.mark.parametrize(
    ("groups", "workers"),
    [
        ("{{0,4},{1,5}}", 2),
        ("[4,2]<=[2,4]T(1,0)", 2),
        ("mesh['slow'=2,'fast'=4] {'fast'}", 4),
        ("mesh['slow'=2,'fast'=4] {'slow','fast'}", 8),
        ("mesh['a'=8] {'a':(2)4}", 4),
        ("{}", None),
    ],
)
def test_the_forms_of_replica_groups(groups, workers):
    text = (
        "ENTRY %main (p: f32[3]) -> f32[3] {\n  %p = f32[3]{0} parameter(0)\n"
        f"  ROOT %r = f32[3]{{0}} all-reduce(%p), replica_groups={groups}, to_apply=%add\n}}\n"
    )
    assert [c.workers for c in fg.audit(text)] == [workers]


def test_every_collective_of_a_live_program():
    def step(x):
        return (
            lax.psum(x, AXIS),
            lax.psum(x[:3].astype(jnp.bfloat16), AXIS),
            lax.all_gather(x.astype(jnp.int8), AXIS),
            lax.psum_scatter(jnp.tile(x, 4), AXIS, tiled=True),
            lax.all_to_all(jnp.tile(x, 4).reshape(4, -1), AXIS, 0, 0),
            lax.ppermute(x, AXIS, [(i, (i + 1) % 4) for i in range(4)]),
        )

    compiled = everywhere("shard_map unchecked", step, 4).lower(jnp.ones((4, 10))).compile()
    found = {}
    for c in fg.audit(compiled):  # an all-to-all may be split into one array for each receiver
        found[c.kind] = (c.dtype, c.bytes + found.get(c.kind, ("", 0))[1])
    assert found == {
        "all-reduce": ("f32", 40 + 12),  # a CPU widens bfloat16 to float32: the reason for it
        "all-gather": ("s8", 10),
        "reduce-scatter": ("f32", 160),
        "all-to-all": ("f32", 160),
        "collective-permute": ("f32", 40),
    }


def test_branches_and_loops_of_a_live_program():
    def step(x, i):
        def dense(x):
            return lax.psum(x, AXIS)

        def turn(x, _):
            return lax.psum(x, AXIS) / 4, None

        x = lax.switch(i, [dense, lambda x: 2 * x, lambda x: dense(x[:3]).sum() + x], x)
        return lax.scan(turn, x, length=3)[0]

    run = jax.shard_map(
        step, mesh=mesh_of(4), in_specs=(P(AXIS), P()), out_specs=P(AXIS), check_vma=False
    )
    found = fg.audit(jax.jit(run).lower(jnp.ones(40), 1).compile())
    assert [(c.branch, c.repeated, c.bytes) for c in found] == [
        ((0,), False, 40),
        ((2,), False, 12),
        ((), True, 40),
    ]


def test_a_text_that_is_no_program_is_refused():
    with pytest.raises(ValueError, match=r"pass jax.jit\(step\)"):
        fg.audit("nothing")
