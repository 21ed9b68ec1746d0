"""What `fftgrad plan` is asked."""

import argparse
from typing import get_args

from fftgrad.advise._cost import Algorithm
from fftgrad.advise.commands._arguments import add_outputs, count, in_file, names, number, seconds

MATRICES = 16


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `plan`."""
    model = parser.add_mutually_exclusive_group()
    model.add_argument(
        "--parameters",
        type=count,
        metavar="N",
        help=f"how many, as 25M: in {MATRICES} square matrices, and a vector of the rest",
    )
    model.add_argument(
        "--params",
        type=in_file,
        metavar="FILE",
        help="the parameters, of which the shapes are read: .npz, .npy, .safetensors",
    )
    parser.add_argument(
        "--gradients",
        type=in_file,
        metavar="FILE",
        help="those of a step, to measure errors on; without --params also the shapes",
    )
    parser.add_argument("--workers", type=count, required=True, metavar="N", help="how many")
    parser.add_argument(
        "--bandwidth",
        type=number,
        required=True,
        metavar="RATE",
        help="of the link of a worker: 100mbit, 1gbit, or bytes per second as a number",
    )
    parser.add_argument(
        "--latency",
        type=number,
        default="100us",
        metavar="TIME",
        help="of a message: 2ms, or seconds as a number (default: 100us)",
    )
    parser.add_argument(
        "--step",
        type=number,
        required=True,
        metavar="TIME",
        help="what a step takes without any exchange: 300ms, or seconds as a number",
    )
    _add_groups(parser)
    parser.add_argument("--buckets", type=count, metavar="N", help="in how many a gradient travels")
    parser.add_argument(
        "--seconds",
        type=seconds,
        default=0.5,
        metavar="S",
        help="how long to time each codec on this machine (default: 0.5)",
    )
    parser.add_argument(
        "--top", type=count, default=10, metavar="N", help="rows to show (default: 10)"
    )
    add_outputs(parser, "what a step is made of as bars")


def _add_groups(parser: argparse.ArgumentParser) -> None:
    """Adds what is said of several links, and of the axes."""
    parser.add_argument(
        "--fast",
        type=count,
        metavar="N",
        help="how many workers fast links join, such as the GPUs of one machine",
    )
    parser.add_argument(
        "--fast-bandwidth", type=number, metavar="RATE", help="of the fast links: 50GB/s"
    )
    parser.add_argument(
        "--fast-latency",
        type=number,
        default="10us",
        metavar="TIME",
        help="of the fast links (default: 10us)",
    )
    parser.add_argument(
        "--axis-name",
        type=names,
        metavar="NAME",
        help="of the workers, for the code (default: data; with --fast: slow,fast)",
    )
    parser.add_argument(
        "--algorithm",
        choices=get_args(Algorithm),
        default="fastest",
        help="of the collectives (default: for each the faster of a ring and a tree)",
    )
