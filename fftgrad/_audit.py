"""What a compiled program really sends."""

import math
import re
from typing import NamedTuple

import jax

_KINDS = "all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute|collective-broadcast|ragged-all-to-all"
