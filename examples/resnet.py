"""ResNet-50 in Equinox, written for one device: `resnet50.py` trains it.

The network of He et al. 2016 (arXiv:1512.03385), with the strides in the 3x3 convolutions, as
everybody has them since. `axes` are the mapped axes that a batch norm takes its means over.
"""

import equinox as eqx
import jax
import jax.numpy as jnp

STAGES = ((3, 64), (4, 128), (6, 256), (3, 512))  # bottlenecks, and the width of their 3x3


class Conv(eqx.Module):
    conv: eqx.nn.Conv2d
    norm: eqx.nn.BatchNorm

    def __init__(self, n_in, n_out, size, stride, axes, key):
        options = dict(padding=size // 2, use_bias=False, key=key)
        self.conv = eqx.nn.Conv2d(n_in, n_out, size, stride, **options)
        self.norm = eqx.nn.BatchNorm(n_out, axes, mode="batch", momentum=0.9)

    def __call__(self, x, state):
        # Statistics in float32, whatever the convolutions compute in.
        y, state = self.norm(self.conv(x).astype(jnp.float32), state)
        return y.astype(x.dtype), state


class Bottleneck(eqx.Module):
    convs: list[Conv]
    shortcut: Conv | None

    def __init__(self, n_in, width, stride, axes, key):
        keys, n_out = jax.random.split(key, 4), 4 * width
        shapes = (n_in, width, 1, 1), (width, width, 3, stride), (width, n_out, 1, 1)
        self.convs = [Conv(*s, axes, k) for s, k in zip(shapes, keys[:3], strict=True)]
        same = n_in == n_out and stride == 1
        self.shortcut = None if same else Conv(n_in, n_out, 1, stride, axes, keys[3])

    def __call__(self, x, state):
        y = x
        for conv in self.convs[:2]:
            y, state = conv(y, state)
            y = jax.nn.relu(y)
        y, state = self.convs[2](y, state)
        if self.shortcut is not None:
            x, state = self.shortcut(x, state)
        return jax.nn.relu(x + y), state


class ResNet(eqx.Module):
    stem: Conv
    blocks: list[Bottleneck]
    head: eqx.nn.Linear

    def __init__(self, axes, key, stages=STAGES, classes=1000):
        keys = iter(jax.random.split(key, 2 + sum(depth for depth, _ in stages)))
        n = stages[0][1]
        self.stem, self.blocks = Conv(3, n, 7, 2, axes, next(keys)), []
        for i, (depth, width) in enumerate(stages):
            for j in range(depth):
                stride = 2 if i and not j else 1
                self.blocks.append(Bottleneck(n, width, stride, axes, next(keys)))
                n = 4 * width
        self.head = eqx.nn.Linear(n, classes, key=next(keys))

    def __call__(self, x, state):
        """Logits `[classes]` of an image `[3, height, width]`, and the new statistics."""
        x, state = self.stem(x, state)
        x = eqx.nn.MaxPool2d(3, 2, padding=1)(jax.nn.relu(x))
        for block in self.blocks:
            x, state = block(x, state)
        return self.head(x.mean((1, 2))), state
