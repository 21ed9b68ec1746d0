"""Faults put into the package on purpose: the tests must notice each one.

To add one, give a file of the package, a text that is in it exactly once, what to put in its place,
and the tests that should fail. They are run without the fault first, and must pass.
"""

import functools
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parent.parent


class Mutant(NamedTuple):
    file: str
    old: str
    new: str
    tests: str


MUTANTS = {
    "what integers were sent is in units of the largest": Mutant(
        "exchanges/_integer_sum.py",
        "part * (scale / self.levels)",
        "part * scale",
        "tests/exchanges/test_exchanges.py -k sent_of_integers",
    ),
    "parts of other sizes share what is drawn": Mutant(
        "exchanges/_parts.py",
        "return step.fold(int(number)) if number else step",
        "return step",
        "tests/methods/test_bytes.py -k 'other_sizes and gather'",
    ),
    "an owner does not pass on that what it got was not finite": Mutant(
        "_channel.py",
        "finite &= jnp.asarray(received.finite)",
        "finite &= True",
        "tests/optimizers/test_zero_steps.py -k 'hides and none'",
    ),
    "the parts of a sum count as the workers' own gradients": Mutant(
        "training/_unreduced.py",
        "part * workers",
        "part * 1",
        "tests/training/test_unreduced.py -k 'one_exchange and dense'",
    ),
    "short messages among many workers go by rings": Mutant(
        "advise/_cost.py",
        'if algorithm != "fastest":',
        "if algorithm:",
        "tests/advise/test_step_model.py -k short_messages",
    ),
    "a parser's own error comes out of a damaged file": Mutant(
        "advise/_gradient_files.py",
        "except Exception as error:",
        "except ValueError as error:",
        "tests/advise/test_files.py -k command_line_names",
    ),
    "what comes back may point away from x": Mutant(
        "testing/_laws.py",
        "inner > 0,",
        "inner != 0,",
        "tests/testing/test_checks.py -k 'broken_codec and flips-'",
    ),
    "a lost worker that is replaced is not lost": Mutant(
        "checkpoint/_lay_out.py",
        "self.before == self.after == len(self.alive)",
        "self.before == self.after",
        "tests/checkpoint/test_reshard.py -k place_of_a_lost",
    ),
    "what a lost worker owned is not counted": Mutant(
        "checkpoint/_lay_out.py",
        '("residual", "shards")',
        '("residual",)',
        "tests/checkpoint/test_reshard.py -k place_of_a_lost",
    ),
    "thresholds of other shards go on": Mutant(
        "checkpoint/_lay_out.py",
        '"seen", "shard warm", "fixed"',
        '"seen", "fixed"',
        "tests/checkpoint/test_reshard.py -k shard_starts_anew",
    ),
    "the overflow of one bucket hides that of another": Mutant(
        "_step.py",
        "overflow=_sum([t.overflow for t in tallies])",
        "overflow=jnp.max(jnp.stack([jnp.asarray(t.overflow, jnp.int32) for t in tallies]))",
        "tests/training/test_metrics.py -k beyond_a_range",
    ),
    "two alike parts draw with one that is not": Mutant(
        "exchanges/_parts.py",
        "number == 0",
        "number == 1",
        "tests/methods/test_bytes.py -k other_sizes",
    ),
    "the sum of weights may overflow": Mutant(
        "training/_weigh.py",
        "jnp.where(total < jnp.inf, total, jnp.nan)",
        "total",
        "tests/training/test_weigh.py -k beyond_float32",
    ),
    "the memory moves on a bad step": Mutant(
        "training/_pmean.py",
        "            (before, states, state.error),",
        "            (remembered, states, state.error),",
        "tests/exchanges/test_nonfinite.py -k 'any_memory and 5000 and Nesterov'",
    ),
    "a sum of chosen values counts as finite": Mutant(
        "exchanges/_all_reduce.py",
        "finite=_finite.all_finite(means)",
        "finite=True",
        "tests/exchanges/test_nonfinite.py -k 'any_exchange and random and 5000'",
    ),
    "the exchange moves on a bad step": Mutant(
        "training/_pmean.py",
        "            (before, states, state.error),",
        "            (before, out.states, state.error),",
        "tests/training/test_bad_steps.py -k keeps_survives",
    ),
    "a bucket does not hear of the others' bad step": Mutant(
        "_step.py",
        "finite=jnp.all(jnp.stack(every)) if every",
        "finite=every[0] if every",
        "tests/training/test_bad_steps.py -k changes_no_bucket",
    ),
    "what a narrow leaf cannot hold counts as finite": Mutant(
        "training/_non_finite.py",
        "jnp.asarray(tally.finite) & _finite.all_finite(leaves)",
        "jnp.asarray(tally.finite)",
        "tests/training/test_bad_steps.py -k float16_leaf",
    ),
    "what rounding drops of a mean is lost": Mutant(
        "training/_pmean.py",
        "remembered = memory.put_back(rounded, remembered)",
        "pass",
        "tests/training/test_pmean.py -k 'rounding_drops and low and bfloat16 and True'",
    ),
    "a subnormal float16 counts as zero": Mutant(
        "ops/_rounding.py",
        "return jnp.where(jnp.abs(x) < float(narrow.tiny), jnp.round(x / unit) * unit, near)",
        "return near",
        "tests/ops/test_rounding.py",
    ),
    "a maximum passes for evidence of finiteness": Mutant(
        "ops/_finite.py",
        "top = jnp.max(jnp.where(jnp.isfinite(x), jnp.abs(x), jnp.inf), axis=axis)",
        "top = jnp.max(jnp.abs(x), axis=axis)",
        "tests/exchanges/test_nonfinite.py -k 'of_a_sum or (decodes and ternary and 5000)'",
    ),
    "a bad worker is not seen by the others": Mutant(
        "exchanges/_all_gather.py",
        "codec.mean(got, likes, tally.poison, step)",
        "codec.mean(got, likes, jnp.zeros(()), step)",
        "tests/exchanges/test_exchanges.py -k fixed_range",
    ),
    "a chain forgets the overflow of its first stages": Mutant(
        "codecs/_chain.py",
        "overflow = _count.add(overflow, out.overflow)",
        "overflow = out.overflow",
        "tests/codecs/test_extremes.py -k 'counts_what_overflows and second'",
    ),
    "a chain forgets the overflow of its last stage": Mutant(
        "codecs/_chain.py",
        "overflow = _count.add(overflow, out.overflow)",
        "overflow = overflow if sides[1:] else out.overflow",
        "tests/codecs/test_extremes.py -k 'counts_what_overflows and last'",
    ),
    "a stage in two stages forgets its state": Mutant(
        "exchanges/_two_stage.py",
        "to_owners, to_all = state.own.rows",
        "to_owners, to_all = self.init(x).own.rows",
        "tests/exchanges/test_two_stage.py",
    ),
    "what a replica rounds away is forgotten": Mutant(
        "optimizers/_sharded.py",
        "return tuple(_rounding.rounded(value, like.dtype) for value, like in pairs)",
        "return tuple(value for value, like in pairs)",
        "tests/training/test_sharded.py -k 'near_to_their_owners and bfloat16'",
    ),
    "the owner of a shard forgets how far it is ahead": Mutant(
        "optimizers/_sharded.py",
        "master = tuple(m + a for m, a in zip(mine, ahead, strict=True))",
        "master = mine",
        "tests/training/test_sharded.py -k 'near_to_their_owners and float32'",
    ),
    "what an inner optimizer hides is not told": Mutant(
        "optimizers/_sharded.py",
        "likes, channel.fold(1), came",
        "likes, channel.fold(1), got.tally._replace(finite=True)",
        "tests/optimizers/test_zero_steps.py -k 'hides and none'",
    ),
    "what comes back is drawn as what went": Mutant(
        "optimizers/_sharded.py",
        "back.init(likes), likes, channel.fold(1)",
        "back.init(likes), likes, channel.fold(0)",
        "tests/optimizers/test_zero_steps.py -k draws_of_its_own",
    ),
    "a sharded optimizer may look at whole leaves": Mutant(
        "optimizers/_check_inner.py",
        "if not np.all(np.abs(cut(one, half) - own) <= near):",
        "if False:",
        "tests/optimizers/test_zero_inner.py -k 'refused and norm'",
    ),
    "the anchor is the parameters' own buffer": Mutant(
        "optimizers/_diloco.py",
        "jax.tree.map(jnp.copy, params)",
        "jax.tree.map(jnp.asarray, params)",
        "tests/optimizers/test_buffers.py -k 'diloco and vmap'",
    ),
    "a sharded optimizer sees a loss that is not weighed": Mutant(
        "optimizers/_local.py",
        "lax.pmean(weighted(own, weight, axis_name), axis_name)",
        "lax.pmean(own, axis_name)",
        "tests/optimizers/test_extra_arguments.py -k 'owners and vmap'",
    ),
    "feedback_adam computes in float16": Mutant(
        "training/_check_gradients.py",
        "return optax.tree.cast(tree, jnp.float32)",
        "return tree",
        "tests/optimizers/test_narrow.py -k 'feedback_adam and float16 and not bfloat16'",
    ),
    "a gather has one dither in every step": Mutant(
        "optimizers/_scatter.py",
        "scatter_dimension=axis, step=step, key=key",
        "scatter_dimension=axis, key=key",
        "tests/training/test_gather_parameters.py -k draw_anew",
    ),
    "a long worker is not clipped": Mutant(
        "exchanges/_averages.py",
        "jnp.minimum(1.0, median[None] / _scale.divisor(norms))",
        "jnp.ones_like(norms)",
        "tests/exchanges/test_averages.py -k cannot_end_training",
    ),
    "workers without a word vote on lengths": Mutant(
        "exchanges/_averages.py",
        "speaks = counts[:, None] & (norms != 0)",
        "speaks = counts[:, None] & (norms >= 0)",
        "tests/exchanges/test_averages.py -k has_no_vote",
    ),
    "what does not count has a vote on lengths": Mutant(
        "exchanges/_averages.py",
        "speaks = counts[:, None] & (norms != 0)",
        "speaks = norms != 0",
        "tests/exchanges/test_averages.py -k 'as_nothing and Median'",
    ),
    "what does not count is averaged": Mutant(
        "exchanges/_averages.py",
        "jnp.where(counts[:, None], clip, 0.0)",
        "clip",
        "tests/exchanges/test_averages.py -k 'as_nothing and Median'",
    ),
    "what does not count is trimmed as a value": Mutant(
        "exchanges/_averages.py",
        "ordered = jnp.sort(jnp.where(counts[:, None], stacked, jnp.inf), axis=0)",
        "ordered = jnp.sort(stacked, axis=0)",
        "tests/exchanges/test_averages.py -k 'as_nothing and Trimmed'",
    ),
    "the mean of nobody is divided by none": Mutant(
        "exchanges/_averages.py",
        "share = weights / jnp.maximum(1.0, jnp.sum(counts, dtype=weights.dtype))",
        "share = weights / jnp.sum(counts, dtype=weights.dtype)",
        "tests/exchanges/test_averages.py -k 'as_nothing and Median'",
    ),
    "a gathered shard has a share of its codec's budget": Mutant(
        "optimizers/_scatter.py",
        "    parts = Parts((codec,))\n",
        "    parts = Parts((codec,)).shard(workers)\n",
        "tests/training/test_sharded.py -k whole_vector",
    ),
    "the bytes of a meeting are those of all parameters": Mutant(
        "training/_metrics.py",
        "_fragments_of([path for path, _ in states])",
        "1",
        "tests/training/test_metrics.py -k 'of_a_meeting and always'",
    ),
    "bins are not around the mean": Mutant(
        "codecs/quantizers/_bin_means.py",
        "centred = y - jnp.sum(y) / y.size",
        "centred = y",
        "tests/optimizers/test_sparse_loco.py -k 'it_is_the_paper and vmap'",
    ),
    "codes are found again for the means of their bins": Mutant(
        "codecs/quantizers/_bin_means.py",
        "cpu=self._codes_in_a_loop, default=self._codes_kept",
        "default=self._codes_kept",
        "tests/codecs/test_many_arrays.py -k whose_mean",
    ),
    "one bit has its bins beside the mean": Mutant(
        "codecs/quantizers/_bin_means.py",
        "2**self.bits / 2 if self.bits > 1 else 0.5",
        "2**self.bits / 2",
        "tests/codecs/test_many_arrays.py -k two_heaps",
    ),
    "a bin without a number is not seen in the others": Mutant(
        "codecs/quantizers/_bin_means.py",
        "jnp.where(jnp.all(jnp.isfinite(payload.side)), payload.side, jnp.nan)",
        "payload.side",
        "tests/codecs/test_extremes.py -k scale_that_is_none",
    ),
    "a NaN is within any scale": Mutant(
        "codecs/quantizers/_sign.py",
        "beyond = ~(jnp.abs(x) <= self._now(step))",
        "beyond = jnp.abs(x) > self._now(step)",
        "tests/codecs/test_extremes.py -k beyond_a_scale",
    ),
    "the least of two far apart is worse than not sent": Mutant(
        "codecs/quantizers/_log_levels.py",
        "up = jnp.minimum(2.0 / (1.0 + ratio), 2.0 - 2.0**-14)",
        "up = jnp.minimum(2.0 / (1.0 + ratio), 2.0)",
        "tests/codecs/test_log_levels.py -k far_apart",
    ),
    "what rounding drops of an accumulated mean is lost": Mutant(
        "training/_accumulate.py",
        "            if lost is None:",
        "            if True:",
        "tests/training/test_wrappers.py -k loses_nothing",
    ),
    "a threshold is halved by its value only": Mutant(
        "codecs/selectors/_threshold.py",
        "BY_VALUE = 8",
        "BY_VALUE = 20",
        "tests/codecs/test_extremes.py -k 'however_far or keeps_no_other'",
    ),
    "the shards of two stages share a dither": Mutant(
        "exchanges/_halves.py",
        "channel.step.fold_local(number)",
        "channel.step",
        "tests/methods/test_bytes.py -k no_two_shards",
    ),
    "shards are padded with zeros": Mutant(
        "exchanges/_shards.py",
        'fill = "edge" if size else "constant"',
        'fill = "constant"',
        "tests/exchanges/test_padding.py -k 'two_stages and sign and 1001'",
    ),
    "recovery compares with the error unsquared": Mutant(
        "_channel.py",
        "return jnp.sqrt(lost_square / jnp.where(square > 0, square, 1.0))",
        "return lost_square / jnp.where(square > 0, square, 1.0)",
        "tests/training/test_bad_steps.py -k compares_the_error",
    ),
    "recovery judges by the error of one worker": Mutant(
        "_channel.py",
        "lost_square, square = everywhere(lax.psum, squares)",
        "lost_square, square = squares",
        "tests/training/test_bad_steps.py -k errors_of_all_workers",
    ),
    "recovery forgets how low the loss was": Mutant(
        "exchanges/_fallback.py",
        "best=jnp.fmin(state.best, smoothed)",
        "best=smoothed",
        "tests/training/test_bad_steps.py::test_the_loss_reaches_what_recovers_by_it[recover]",
    ),
    "the loss does not reach an exchange inside another": Mutant(
        "exchanges/_switch.py",
        "exchange.observe(state, loss, step),",
        "state,",
        "tests/training/test_bad_steps.py -k the_loss_reaches",
    ),
    "codes beyond the largest number are not clamped": Mutant(
        "codecs/quantizers/_window.py",
        "number = jnp.minimum(index - 1 + self.base, _last(self.m))",
        "number = index - 1 + self.base",
        "tests/codecs/test_extremes.py -k any_codes",
    ),
    "an optimizer keeps a bad step": Mutant(
        "optimizers/_feedback.py",
        "optax.tree.where(good, moved, own)",
        "moved",
        "tests/training/test_bad_steps.py -k optimizer_recovers",
    ),
    "feedback_adam ignores its exchange": Mutant(
        "optimizers/_feedback.py",
        "recipe_of(owner, exchange, memory, layout)",
        "recipe_of(owner, FILLED, memory, layout)",
        "tests/methods/test_bytes.py -k 'fills and feedback_adam'",
    ),
    "feedback_adam does not lead": Mutant(
        "optimizers/_feedback.py",
        "(1 - nu) * g + nu * m",
        "m",
        "tests/optimizers/test_feedback.py -k lead",
    ),
    "the header has another version": Mutant(
        "ops/_wire.py",
        "VERSION = 2\n",
        "VERSION = 3\n",
        "tests/methods/test_bytes.py -k checksum_finite",
    ),
    "a buffer of another version is read": Mutant(
        "ops/_wire.py",
        "repr((VERSION, parts))",
        "repr((0, parts))",
        "tests/exchanges/test_checksum.py -k another_version",
    ),
    "a buffer that is not valid is read": Mutant(
        "ops/_wire.py",
        "finite = valid & ((words[1] & 1) == 1)",
        "finite = (words[1] & 1) == 1",
        "tests/exchanges/test_checksum.py -k 'every_flip and sign'",
    ),
    "the checksum is a plain sum": Mutant(
        "ops/_wire.py",
        "jnp.sum(_hash.bits(jnp.uint32(0), words, words.size), dtype=jnp.uint32)",
        "jnp.sum(words, dtype=jnp.uint32)",
        "tests/exchanges/test_checksum.py -k in_pairs",
    ),
    "the owner of a shard keeps an invalid buffer to itself": Mutant(
        "_channel.py",
        "valid = jnp.asarray(received.invalid) == 0",
        "valid = True",
        "tests/exchanges/test_checksum.py -k 'owner_of_a_shard'",
    ),
    "steps that one worker skipped alone are not told": Mutant(
        "_channel.py",
        "Step(number, shared, local, skipped)",
        "Step(number, shared, local)",
        "tests/exchanges/test_checksum.py -k 'receiver_alone'",
    ),
    "a worker's weight counts as if it were all": Mutant(
        "training/_value_and_grad.py",
        "all_total / all_weight * change) / all_weight",
        "all_total / all_weight * change) / (workers * weight)",
        "tests/training/test_value_and_grad.py -k 'global_weight and int32'",
    ),
    "a frozen leaf is exchanged": Mutant(
        "training/_trainable.py",
        "part if keep else None",
        "part",
        "tests/training/test_trainable.py -k 'every_method and feedback_adam'",
    ),
    "the update of a frozen leaf is its gradient": Mutant(
        "training/_trainable.py",
        "jnp.zeros(g.shape, g.dtype)",
        "g",
        "tests/training/test_trainable.py -k 'every_method and feedback_adam'",
    ),
    "optax's placeholder is masked": Mutant(
        "training/_trainable.py",
        "params if stands_in(params) else ",
        "",
        "tests/training/test_trainable.py -k optax_finds",
    ),
    "a weight is swallowed": Mutant(
        "training/_pmean.py",
        "grads = weighted(grads, weight, axis_name)",
        "pass",
        "tests/training/test_weigh.py -k 'every_method and top_k'",
    ),
    "a watched loss is not weighed": Mutant(
        "training/_pmean.py",
        "weighted(jnp.asarray(value, jnp.float32), weight, axis_name)",
        "jnp.asarray(value, jnp.float32)",
        "tests/training/test_weigh.py -k watched",
    ),
    "a worker without weight shows its NaN": Mutant(
        "training/_weigh.py",
        "jnp.where(own == 0, 0, leaf)",
        "leaf",
        "tests/training/test_weigh.py -k may_hold_anything",
    ),
    "1-bit Adam swallows a weight": Mutant(
        "methods/_scale_by_one_bit_adam.py",
        'extra.get("weight")',
        "None",
        "tests/training/test_weigh.py -k 'every_method and one_bit_adam'",
    ),
    "votes in a composite take a weight": Mutant(
        "_contracts.py",
        "return all(exchange.takes_weight for exchange in self.inner)",
        "return True",
        "tests/training/test_weigh.py -k votes_have_no_weights",
    ),
    "the weight has no gradient": Mutant(
        "training/_value_and_grad.py",
        "change = weight - lax.stop_gradient(weight)",
        "change = 0.0 * weight",
        "tests/training/test_value_and_grad.py -k may_depend",
    ),
    "the parts of a bucket share what is drawn": Mutant(
        "exchanges/_parts.py",
        "return jax.tree.map(functools.partial(jnp.where, number == 0), step, step.fold(number))",
        "return step",
        "tests/methods/test_bytes.py -k 'what_is_drawn and random and None'",
    ),
    "parts with other codecs count as alike": Mutant(
        "exchanges/_alike.py",
        "(static, structure, *map(jax.typeof, leaves))",
        "(structure, *map(jax.typeof, leaves))",
        "tests/exchanges/test_alike.py -k of_their_own",
    ),
    "an accelerator looks at seven digits of eight": Mutant(
        "codecs/selectors/_largest.py",
        "range(KEY_BITS + 1 - DIGIT_BITS, -1, -DIGIT_BITS)",
        "range(KEY_BITS + 1 - DIGIT_BITS, 0, -DIGIT_BITS)",
        "tests/codecs/test_selectors.py -k 'hard_inputs and cuda and 400'",
    ),
    "an accelerator keeps the last among equals": Mutant(
        "codecs/selectors/_largest.py",
        "jnp.concatenate(_bitmap.pack(keys > threshold, keys == threshold))",
        "jnp.concatenate(_bitmap.pack(keys == threshold, keys > threshold))",
        "tests/codecs/test_selectors.py -k 'hard_inputs and cuda and 400'",
    ),
    "an accelerator halves on when it has found a threshold": Mutant(
        "codecs/selectors/_threshold.py",
        "halved, going_on = b.halve(middles[node], count, k), b.unfinished",
        "halved, going_on = b.halve(middles[node], count, k), b.unfinished | True",
        "tests/codecs/test_extremes.py -k 'halving and cuda and heavy'",
    ),
    "an accelerator walks the wrong way down the tree of middles": Mutant(
        "codecs/selectors/_threshold.py",
        "node = 2 * node + 1 + (count >= k).astype(jnp.int32)",
        "node = 2 * node + 1 + (count < k).astype(jnp.int32)",
        "tests/codecs/test_extremes.py -k 'halving and cuda and heavy'",
    ),
    "payloads that are decoded together forget their scale": Mutant(
        "codecs/_sum.py",
        "lambda t, row: row[0].add_to(t, row[1])",
        "lambda t, row: row[0].add_to(t, 1.0)",
        "tests/exchanges/test_exchanges.py -k 'at_once and ada'",
    ),
    "more payloads are decoded side by side than the sum has room for": Mutant(
        "codecs/_sum.py",
        "size // (DECODED * max(1, slots))",
        "size // max(1, slots)",
        "tests/codecs/test_sum.py -k room",
    ),
    "stacked pieces are cut along another axis": Mutant(
        "ops/_joined.py",
        "return cut(x, sizes, axis + 1), [True]",
        "return cut(x, sizes, axis), [True]",
        "tests/ops/test_joined.py",
    ),
    "the places of pieces are no secret": Mutant(
        "ops/_joined.py",
        "cpu=hidden, default=known",
        "cpu=known, default=known",
        "tests/ops/test_joined.py -k kernel",
    ),
    "a table knows no workers": Mutant(
        "advise/_table.py",
        "others = (slow - most) *",
        "others = 0 * (slow - most) *",
        "tests/advise/test_table.py -k workers",
    ),
    "any number of steps to an exchange will do": Mutant(
        "advise/_period.py",
        "given in (None, found) or streams",
        "True or streams",
        "tests/advise/test_table.py -k refused_unless",
    ),
    "rows of no block are all at the same place": Mutant(
        "codecs/transforms/_blocks.py",
        "owners = beyond + jnp.arange(k, dtype=jnp.int32)",
        "owners = beyond + jnp.zeros(k, jnp.int32)",
        "tests/codecs/test_transforms.py -k of_one_block",
    ),
    "a filled message hides what is not finite": Mutant(
        "codecs/selectors/_budget.py",
        "kept = jnp.where(finite, kept, lax.iota(jnp.int32, kept.size) == 0)",
        "pass",
        "tests/codecs/test_budget.py -k among_any",
    ),
    "equal coefficients come all at once": Mutant(
        "codecs/selectors/_fill.py",
        "jnp.where(index < cut, magnitude * units[1], reaches)",
        "jnp.where(index < 0, magnitude * units[1], reaches)",
        "tests/codecs/test_budget.py -k sent_in_part",
    ),
    "what is not sent moves the codes behind it": Mutant(
        "ops/packing/_exp_golomb.py",
        "jnp.where(used, exponents(*c), 0)",
        "exponents(*c)",
        "tests/codecs/test_budget.py -k golomb",
    ),
    "what is left holds what was sent": Mutant(
        "exchanges/_parts.py",
        "_sum.add(codec, vector, payload, -1.0, _own(step, number))",
        "vector + 0 * _sum.add(codec, vector, payload, -1.0, _own(step, number))",
        "tests/testing/test_checks.py -k library_pass",
    ),
    "the last code loses its end": Mutant(
        "ops/packing/_stream.py",
        "return _stored(self.words, _word_and_bit(self.place)[0], self.pending)[:-1]",
        "return self.words[:-1]",
        "tests/codecs/test_budget.py -k golomb",
    ),
    "the word behind a code loses its first bits": Mutant(
        "ops/packing/_stream.py",
        "jnp.where(_word_and_bit(place)[0] == at, pending, over)",
        "jnp.where(_word_and_bit(place)[0] == at, pending, 0)",
        "tests/codecs/test_budget.py -k golomb",
    ),
    "a running sum starts anew in each turn": Mutant(
        "ops/_scan.py",
        "carry = combine(carry, value)",
        "carry = combine(jnp.int32(0), value)",
        "tests/ops",
    ),
    "a skipped step counts what overflows": Mutant(
        "training/_non_finite.py",
        "jnp.where(finite, tally.overflow, 0)",
        "jnp.asarray(tally.overflow)",
        "tests/training/test_bad_steps.py -k bad_bucket",
    ),
    "a law of codecs holds in the first step only": Mutant(
        "testing/_laws.py",
        "STEPS = (0, 1, 2, 7)",
        "STEPS = (0,)",
        "tests/testing/test_checks.py -k first_step_only",
    ),
    "a bucket does not wait for the one before it": Mutant(
        "training/_travel.py",
        "bucket = _finite.nan_unless(jnp.asarray(outs[-1].tally.finite), bucket)",
        "bucket, _ = jax.lax.optimization_barrier((bucket, outs[-1].mean))",
        "tests/training/test_wrappers.py -k one_before",
    ),
    "the first bits of a bitmap end a word too early": Mutant(
        "ops/packing/_bitmap.py",
        "jnp.sum(before < count, dtype=jnp.int32) - 1",
        "jnp.sum(before < count - 1, dtype=jnp.int32) - 1",
        "tests/ops/test_packing.py -k 'finds_every_set_bit and cpu'",
    ),
    "the mean of payloads is a sum": Mutant(
        "exchanges/_parts.py",
        "1.0 / workers if shares is None else shares",
        "1.0 if shares is None else shares",
        "tests/test_completeness.py -k 'docstrings and decompress_mean'",
    ),
    "the buckets share what is drawn": Mutant(
        "training/_travel.py",
        "run(bucket, state, channel.fold(i))",
        "run(bucket, state, channel)",
        "tests/methods/test_bytes.py -k 'what_is_drawn and gather and 160'",
    ),
    "the parts of an integer sum share what is drawn": Mutant(
        "exchanges/_integer_sum.py",
        "[step.fold(i) if i else step for i in range(len(jax.tree.leaves(x)))]",
        "[step for _ in jax.tree.leaves(x)]",
        "tests/methods/test_bytes.py -k 'what_is_drawn and integer and None'",
    ),
    "local shares of noise are too small": Mutant(
        "contrib/_top_votes.py",
        "self.sigma / math.sqrt(self.workers)",
        "self.sigma / self.workers",
        "tests/contrib/test_top_votes.py -k 'stated_variance and local-vmap'",
    ),
    "zero votes": Mutant(
        "contrib/_top_votes.py",
        "jnp.where(x == 0, 1, jnp.where(up, 2, 0))",
        "jnp.where(up, 2, 0)",
        "tests/contrib/test_top_votes.py -k not_on_zeros",
    ),
    "the votes of one bucket count": Mutant(
        "contrib/_epsilon.py",
        "sum(map(votes.votes, buckets))",
        "votes.votes(buckets[0])",
        "tests/contrib/test_privacy.py -k opposite",
    ),
    "parts travel as the leaves come": Mutant(
        "exchanges/_layout.py",
        "[tuple(sorted(bucket, key=lambda part: part.name)) for bucket in buckets]",
        "[tuple(bucket) for bucket in buckets]",
        "tests/exchanges/test_layout_and_wire.py -k 'order_of_their_names and leaf'",
    ),
    "the last piece is what is left": Mutant(
        "exchanges/_layout.py",
        "_cut(leaves, -(-total // -(-total // limit)))",
        "_cut(leaves, limit)",
        "tests/exchanges/test_layout_and_wire.py -k 'never_exceed and 64'",
    ),
    "a loss is told to exchanges that did not run": Mutant(
        "exchanges/_switch.py",
        "jnp.where(ran, new, old)",
        "new",
        "tests/training/test_bad_steps.py -k 'what_ran_alone and piece'",
    ),
    "a loss is told to the level that has not run yet": Mutant(
        "exchanges/_fallback.py",
        "_switch.observe(shared.ran, self.ladder",
        "_switch.observe(shared.level, self.ladder",
        "tests/training/test_bad_steps.py -k 'what_ran_alone and within'",
    ),
    "a level judges by the loss of the one before": Mutant(
        "exchanges/_fallback.py",
        "return optax.tree.where(state.ran == state.level, risen, state)",
        "return risen",
        "tests/training/test_bad_steps.py -k 'what_ran_alone and level'",
    ),
    "a shared support forgets what its transform counts": Mutant(
        "exchanges/_shared_support.py",
        "_count.add(spectra.overflow, chosen_by)",
        "chosen_by",
        "tests/exchanges/test_exchanges.py -k 'overflow_is_counted and PredictedSupport'",
    ),
    "what those who do not lead leave behind is counted": Mutant(
        "exchanges/_shared_support.py",
        "jnp.where(self.support.leads(channel), selected.overflow, 0)",
        "selected.overflow",
        "tests/exchanges/test_exchanges.py -k stays_behind",
    ),
    "a drift starts from nothing": Mutant(
        "exchanges/_supports.py",
        "jnp.where(total > 0, total / jnp.maximum(count, 1.0), 1.0)",
        "total / jnp.maximum(count, 1.0)",
        "tests/exchanges/test_exchanges.py -k 'threshold_by_the_mean and True'",
    ),
    "one shard's overflow stands for all": Mutant(
        "training/_non_finite.py",
        "over_other_axes(_sum, jnp.where(finite, tally.overflow, 0))",
        "over_other_axes(lax.pmax, jnp.where(finite, tally.overflow, 0))",
        "tests/training/test_pmean.py -k summed_over_the_model_axis",
    ),
    "a chain claims more than is right on average": Mutant(
        "codecs/_chain.py",
        "all(s.unbiased for s in self.stages) and all(s.summable for s in self.stages[:-1])",
        "all(s.unbiased for s in self.stages)",
        "tests/codecs/test_codecs.py -k not_right_on_average",
    ),
    "the shortest path decides how a state is sharded": Mutant(
        "training/_state_specs.py",
        "(names[start:] for start in range(len(names) + 1))",
        "(names[start:] for start in reversed(range(len(names) + 1)))",
        "tests/training/test_init.py -k longest_path",
    ),
    "a state is sharded along axes that it lacks": Mutant(
        "training/_state_specs.py",
        "if end is not None and len(by_path[end]) <= jnp.ndim(node):",
        "if end is not None:",
        "tests/training/test_init.py -k fewer_axes",
    ),
    "a branch is typed as JAX finds it": Mutant(
        "exchanges/_switch.py",
        "sent=jax.tree.map(_axes.vary_like, out.sent, x),",
        "",
        "tests/exchanges/test_exchanges.py -k 'low_rank_and_gathered and True'",
    ),
    "an idle step is typed as equal on all shards": Mutant(
        "training/_accumulate.py",
        "_axes.vary_like(jnp.zeros(a.shape, a.dtype), a)",
        "jnp.zeros(a.shape, a.dtype)",
        "tests/training/test_meshes.py -k 'shards_accumulate and True'",
    ),
    "a hierarchy counts one piece alone": Mutant(
        "exchanges/_hierarchical.py",
        "(counts >> 1, counts & 1)",
        "((counts >> 1).ravel()[:1], counts & 1)",
        "tests/training/test_meshes.py -k 'counts_what_overflows and bfloat16'",
    ),
    "a low rank in turns sends what all had": Mutant(
        "exchanges/_acp_sgd.py",
        "tree(factors(own), dense)",
        "tree(common, dense)",
        "tests/methods/test_methods.py -k 'worker_keeps and acp'",
    ),
    "the same factor travels in every step": Mutant(
        "exchanges/_acp_sgd.py",
        "1 - before.turn,",
        "before.turn,",
        "tests/exchanges/test_acp_sgd.py -k largest_directions",
    ),
    "the number of the step says whose turn it is": Mutant(
        "exchanges/_acp_sgd.py",
        "is_first = before.turn == 0",
        "is_first = jnp.asarray(channel.step.number) % 2 == 0",
        "tests/exchanges/test_acp_sgd.py -k bad_steps_are_no_turns",
    ),
    "all matrices send their left factors in the same steps": Mutant(
        "exchanges/_acp_sgd.py",
        "flips[i] = ahead * more > 0",
        "flips[i] = False",
        "tests/exchanges/test_acp_sgd.py -k 'half or balanced'",
    ),
    "a step without a gradient ends a factor": Mutant(
        "exchanges/_low_rank.py",
        "jnp.where(jnp.any(new != 0, axis=0), new, old)",
        "new",
        "tests/exchanges/test_acp_sgd.py -k end_nothing",
    ),
    "a direction has the length of the gradient": Mutant(
        "methods/_scale_by_dion.py",
        "length = jnp.sqrt(jnp.sum(jnp.square(scaled), axis=0, keepdims=True))",
        "length = jnp.ones_like(top)",
        "tests/methods/test_dion.py -k one_length",
    ),
    "in and out change places": Mutant(
        "methods/_scale_by_dion.py",
        "(columns / rows) ** 0.5",
        "(rows / columns) ** 0.5",
        "tests/methods/test_dion.py -k one_length",
    ),
    "the other transformation moves on a bad step": Mutant(
        "methods/_scale_by_dion.py",
        "optax.tree.where(finite, moved, state.others)",
        "moved",
        "tests/methods/test_dion.py -k leaves_no_trace",
    ),
    "a row is weighted by the new number of workers": Mutant(
        "checkpoint/_rows.py",
        "yield i, overlap / before",
        "yield i, overlap / workers",
        "tests/checkpoint/test_reshard.py -k by_the_intervals",
    ),
    "the last value of a longer shard is dropped": Mutant(
        "checkpoint/_rows.py",
        "row[: least + (i < longer)]",
        "row[: least + (i < longer - 1)]",
        "tests/checkpoint/test_reshard.py -k cut_as_the_exchange",
    ),
    "workers that grew in number share a key": Mutant(
        "checkpoint/_lay_out.py",
        "if not old.is_key:",
        "if True:",
        "tests/checkpoint/test_reshard.py -k keys_of_workers",
    ),
    "the rows of a lost worker are spread": Mutant(
        "checkpoint/_lay_out.py",
        "[plan.alive], plan.after)",
        ", plan.after)",
        "tests/checkpoint/test_reshard.py -k took_along",
    ),
    "groups of another size are taken for the same": Mutant(
        "checkpoint/_lay_out.py",
        "(plan.same and old.pieces == new.pieces)",
        "plan.same",
        "tests/checkpoint/test_reshard.py -k joined",
    ),
    "bare rows of local steps are not known": Mutant(
        "checkpoint/_leaves.py",
        'leaf._replace(kind="own") if is_row(n, leaf) else leaf for',
        "leaf for",
        "tests/checkpoint/test_reshard.py -k 'local_workers and bare'",
    ),
    "whatever is as long as the workers are many has rows": Mutant(
        "checkpoint/_leaves.py",
        'f".{name}".endswith(end) and leaf.shape == shape',
        "leaf.shape[:1] == shape[:1]",
        "tests/checkpoint/test_reshard.py -k nothing_tells",
    ),
    "what has no place is left behind": Mutant(
        "checkpoint/_lay_out.py",
        "unlike += [",
        "_ = [",
        "tests/checkpoint/test_reshard.py -k 'would_be_lost or another_name'",
    ),
    "owners' residuals are spread as if they were workers'": Mutant(
        "checkpoint/_leaves.py",
        'elif field == "memory":\n',
        'elif field == "memory":\n            yield from _each(here, value, "residual")\n'
        '        elif field == "":\n',
        "tests/checkpoint/test_reshard.py -k 'nothing_is_lost and stages and 3'",
    ),
    "an array is taken as it is read": Mutant(
        "checkpoint/_restore.py",
        'if _folder.total(value) != row["sum"]:',
        "if False:",
        "tests/checkpoint/test_checkpoint.py -k 'other_bits or flipped'",
    ),
    "a sum does not know the places": Mutant(
        "checkpoint/_folder.py",
        "total += int(np.sum(part * (2 * places + 1), dtype=np.uint32))",
        "total += int(np.sum(part, dtype=np.uint32))",
        "tests/checkpoint/test_checkpoint.py -k on_devices",
    ),
    "two signs that change together have one sum": Mutant(
        "checkpoint/_copies.py",
        "_hash.bits(jnp.uint32(0), words.astype(jnp.uint32), words.size)",
        "words.astype(jnp.uint32) * (2 * jnp.arange(words.size, dtype='uint32') + 1)",
        "tests/checkpoint/test_checkpoint.py -k 'copies and sign'",
    ),
    "only what has rows is compared": Mutant(
        "checkpoint/_copies.py",
        "return len(places) < whole and",
        "return len(places) > 1 and len(places) < whole and",
        "tests/checkpoint/test_checkpoint.py -k 'copies_that and last'",
    ),
    "a damaged checkpoint ends the search": Mutant(
        "checkpoint/_restore.py",
        "                continue\n",
        "                break\n",
        "tests/checkpoint/test_checkpoint.py -k 'before_a_damaged and gone'",
    ),
    "a checkpoint forgets the data of keys": Mutant(
        "checkpoint/_save.py",
        "jax.random.key_data(value) if leaf.is_key",
        "jax.random.key_data(jax.random.key(0)) if leaf.is_key",
        "tests/checkpoint/test_checkpoint.py -k back_where",
    ),
    "a fast worker keeps an invalid buffer to itself": Mutant(
        "exchanges/_hierarchical.py",
        "(counts >> 1, counts & 1)",
        "(counts >> 1, (counts & 1).ravel()[:1])",
        "tests/exchanges/test_checksum.py -k 'between_two_groups and 2'",
    ),
    "the last contributions before an anchor are removed": Mutant(
        "islands/_anchors.py",
        "and number < before",
        "and number <= before",
        "tests/islands/test_closing.py -k two_anchors",
    ),
    "one anchor is kept in place of two": Mutant(
        "islands/_anchors.py",
        "ANCHORS_KEPT = 2",
        "ANCHORS_KEPT = 1",
        "tests/islands/test_closing.py -k two_anchors",
    ),
    "what a manifest names is not looked at when it is read again": Mutant(
        "islands/_fetch.py",
        "if isinstance(data, bytes) and _is_named(data, entry):",
        "if isinstance(data, bytes):",
        "tests/islands/test_closing.py -k names_is_what",
    ),
    "two starts of an island count in one round": Mutant(
        "islands/_judge.py",
        "if one.contribution.who in newest.values()",
        "if one.contribution.who",
        "tests/islands/test_closing.py -k newest_start",
    ),
    "islands round by chance alike": Mutant(
        "islands/_member.py",
        "own = zlib.crc32(str(self.who).encode())",
        "own = 0",
        "tests/islands/test_closing.py -k draw_differently",
    ),
    "a slow island is waited for": Mutant(
        "islands/_judge.py",
        "for entry in counted if entry.base == anchor.round",
        "for entry in counted",
        "tests/islands/test_closing.py -k slow_island",
    ),
    "a codec forgets what it sent": Mutant(
        "islands/_ledger.py",
        "kept, states = pending.memory, pending.states",
        "kept = pending.memory",
        "tests/islands/test_closing.py -k remembers",
    ),
    "who has left is waited for": Mutant(
        "islands/_gathering.py",
        "awaited = set(expected) - self.left",
        "awaited = set(expected)",
        "tests/islands/test_waiting.py -k who_has_left",
    ),
    "an object gets its name before it is on the disk": Mutant(
        "islands/_folder.py",
        "                os.fsync(file.fileno())\n",
        "",
        "tests/islands/test_store.py -k before_it_has_its_name",
    ),
    "weights are lost in a clip": Mutant(
        "islands/_programs.py",
        "exchange.average.of(decode, payloads, counts, shares)",
        "exchange.average.of(decode, payloads, counts)",
        "tests/islands/test_objects.py -k weights_count",
    ),
}


def copied(folder):
    """The package, its tests and its settings."""
    for name in ("fftgrad", "tests"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", folder)
    return folder


def run(folder, tests):
    """The exit code of pytest, 0 for passed and 1 for failed, and what it printed."""
    path = os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "pytest", "-n", "0", "-q", "-x", "-p", "no:cacheprovider"]
    out = subprocess.run(
        [*command, "-m", "", *shlex.split(tests)],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    return out.returncode, out.stdout + out.stderr


@functools.cache
def passes_without_a_fault(tests):
    return run(ROOT, tests)


@pytest.mark.parametrize("mutant", MUTANTS.values(), ids=MUTANTS)
def test_the_place_of_a_fault_is_there_once(mutant):
    """Quick: the list must follow the package when that is rewritten."""
    text = (ROOT / "fftgrad" / mutant.file).read_text()
    assert text.count(mutant.old) == 1
    assert mutant.new != mutant.old
    assert (ROOT / shlex.split(mutant.tests)[0].partition("::")[0]).exists()


@pytest.mark.slow
@pytest.mark.parametrize("mutant", MUTANTS.values(), ids=MUTANTS)
def test_a_fault_is_noticed(mutant, tmp_path):
    code, output = passes_without_a_fault(mutant.tests)
    assert code == 0, output
    folder = copied(tmp_path)
    path = folder / "fftgrad" / mutant.file
    path.write_text(path.read_text().replace(mutant.old, mutant.new))
    code, output = run(folder, mutant.tests)
    assert code == 1, f"not noticed by {mutant.tests}\n{output}"
