"""Tools: what people run beside training. May import everything but `methods`, `optimizers`."""

from fftgrad.ops._collectives import Collective as Collective
from fftgrad.tools._analyze import Analysis as Analysis
from fftgrad.tools._analyze import analyze as analyze
from fftgrad.tools._audit import audit as audit
from fftgrad.tools._bytes import from_bytes as from_bytes
from fftgrad.tools._bytes import to_bytes as to_bytes
from fftgrad.tools._compress import compress as compress
from fftgrad.tools._compress import decompress as decompress
from fftgrad.tools._compress import decompress_mean as decompress_mean
from fftgrad.tools._cost import SyncCost as SyncCost
from fftgrad.tools._cost import redsync_cost as redsync_cost
from fftgrad.tools._fit import Fit as Fit
from fftgrad.tools._fit import FitRow as FitRow
from fftgrad.tools._fit import fit as fit
from fftgrad.tools._gradient_files import load_gradients as load_gradients
from fftgrad.tools._gradient_files import save_gradients as save_gradients
from fftgrad.tools._link import Link as Link
from fftgrad.tools._link_bytes import link_bytes as link_bytes
from fftgrad.tools._preview import PreviewRow as PreviewRow
from fftgrad.tools._preview import preview as preview
from fftgrad.tools._replicas import Replicas as Replicas
from fftgrad.tools._replicas import replica_checksum as replica_checksum
from fftgrad.tools._wire_bytes import wire_bytes as wire_bytes
from fftgrad.tools.analysis._figures import Figures as Figures
from fftgrad.tools.analysis._rates import Rate as Rate
from fftgrad.tools.analysis._workers import StepPair as StepPair
