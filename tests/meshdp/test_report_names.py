"""What the report calls the operation of a collective."""

import dataclasses

import pytest

from meshdp.report._sections import what

from .test_report_work import moved

PIPELINE = "pipeline(stages=2,microbatches=4,repeats=1)"


def named(op_name, argument=""):
    found = moved("all-reduce", ("data",), 16, 8, 28)
    return dataclasses.replace(found, op_name=op_name, argument=argument)


@pytest.mark.parametrize(
    "op_name, said",
    [
        ("jit(step)/dot_general", "dot_general"),
        ("jit(step)/jvp()/while/body/attend/dot_general", "forward attend/dot_general"),
        ("jit(step)/transpose(jvp(mlp))/dot_general", "backward mlp/dot_general"),
        (
            "jit(step)/transpose(jvp())/checkpoint/rematted_computation/tanh",
            "recomputed tanh",
        ),
        (f"jit(step)/shard_map/jvp({PIPELINE})/ppermute", "forward pipeline/ppermute"),
        (
            f"jit(s)/shard_map/(transpose(jvp())/sum:transpose(jvp({PIPELINE}))/psum:jvp()/sum)",
            "backward sum, pipeline/psum",
        ),
        ("jit(step)/scale(x)/psum", "scale(x)/psum"),
        ("", ""),
    ],
)
def test_an_operation_is_named_without_what_jax_puts_around_it(op_name, said):
    assert what(named(op_name)) == said


def test_an_argument_that_is_moved_is_named_instead_and_its_layers_are_one():
    assert what(named("jit(step)/jvp()/dot", "state.w[3]")) == "forward state.w[*]"
