"""What each program in `programs/` computes, in plain JAX and NumPy on one device.

Nothing here is sharded or mapped over devices, and nothing is ours.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax

N = 8  # devices


def imagenet():
    data = np.random.default_rng(0)
    w, b = jnp.zeros((6, 4)), jnp.zeros(4)
    optimizer = optax.sgd(0.1, momentum=0.9)
    params = (w, b)
    opt_state = optimizer.init(params)
    losses = []
    for _ in range(3):
        x = data.normal(size=(16, 6)).astype(np.float32)
        y = data.integers(0, 4, size=16)

        def loss_fn(params, x=x, y=y):
            logp = jax.nn.log_softmax(x @ params[0] + params[1][None])
            return -logp[np.arange(16), y].mean()

        loss, grads = jax.value_and_grad(loss_fn)(params)
        updates, opt_state = optimizer.update(grads, opt_state)
        params = optax.apply_updates(params, updates)
        losses.append(float(loss))
    return {"losses": losses, "w": params[0], "leaves": 2}


def nerf():
    data = np.random.default_rng(1)
    keys = jax.random.split(jax.random.PRNGKey(20200823), N)
    w = jnp.zeros((5, 3))
    losses = []
    for step in range(3):
        rays = data.normal(size=(16, 5)).astype(np.float32).reshape(N, 2, 5)
        pixels = data.uniform(size=(16, 3)).astype(np.float32).reshape(N, 2, 3)
        pairs = [jax.random.split(k) for k in keys]
        keys = [p[0] for p in pairs]
        noise = jnp.stack([jax.random.normal(p[1], (3,)) for p in pairs])

        def loss_fn(w, rays=rays, pixels=pixels, noise=noise):
            return jnp.mean((jax.nn.sigmoid(rays @ w + noise[:, None]) - pixels) ** 2)

        loss, grad = jax.value_and_grad(loss_fn)(w)
        w = w - 0.5 / (1 + step) * grad
        losses.append(float(loss))
    return {"losses": losses, "w": w, "seed": 20201473}


def ppo():
    data = np.random.default_rng(2)
    pi = jnp.eye(3)
    for _ in range(3):
        obs = data.normal(size=(4, 6, 3)).astype(np.float32)
        actions = jnp.tanh(obs @ pi)
        advantages = data.normal(size=(4, 6)).astype(np.float32)

        def loss_fn(pi, obs=obs, actions=actions, advantages=advantages):
            ratio = (actions * jnp.tanh(obs @ pi)).sum(-1)
            low = jnp.minimum(ratio * advantages, ratio.clip(0.8, 1.2) * advantages)
            return -low.mean()

        pi = pi - 0.3 * jax.grad(loss_fn)(pi)
    return {"pi": pi, "devices": 8}


def evolution():
    target = np.array([1.0, -2.0, 0.5], np.float32)
    theta = jnp.zeros(3)
    keys = jax.random.split(jax.random.PRNGKey(3), N)
    best = []
    for _ in range(3):
        epsilon = jnp.stack([jax.random.normal(k, (3,)) for k in keys])
        rewards = -((theta[None] + 0.1 * epsilon - target[None]) ** 2).sum(-1)
        advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-8)
        theta = theta + 0.2 * 0.1 * (advantages @ epsilon) / (N * 0.1)
        best.append(float(rewards.max()))
        keys = jax.random.split(jax.random.split(keys[0])[0], N)
    return {"theta": theta, "best": best, "zeros": np.zeros(3)}


def score_sde():
    data = np.random.default_rng(4)
    params = jnp.zeros((3, 3))
    rng = jax.random.PRNGKey(42)
    losses = []
    for _ in range(2):
        batches = data.normal(size=(8, 2, 4, 3)).astype(np.float32)
        rng, *keys = jax.random.split(rng, N + 1)
        some = []
        for inner in range(2):
            batch = batches[:, inner]
            pairs = [jax.random.split(k) for k in keys]
            keys = [p[0] for p in pairs]
            t = jnp.stack([jax.random.uniform(p[1], (4,)) for p in pairs])

            def loss_fn(params, batch=batch, t=t):
                return jnp.mean((batch @ params + t[..., None] * batch) ** 2)

            loss, grad = jax.value_and_grad(loss_fn)(params)
            params = params - 0.1 * grad
            some.append(loss)
        losses.append(np.mean(some))
    return {"losses": losses, "params": params, "step": 4}


def population():
    data = np.random.default_rng(5)
    x = data.normal(size=(12, 4)).astype(np.float32)
    y = (x @ np.array([1, -1, 2, 0], np.float32)).astype(np.float32)
    w = data.normal(size=(8, 4)).astype(np.float32)
    lrs = np.linspace(0.01, 0.2, 8, dtype=np.float32)
    for _ in range(3):
        errors = w @ x.T - y[None]  # [members, examples]
        losses = (errors**2).mean(1)
        w = w - lrs[:, None] * 2 * errors @ x / 12
        order = np.argsort(losses)
        parents = order.copy()
        parents[-2:] = order[:2]
        w = w[parents]
    return {"w": w, "losses": losses, "predictions": x @ w.T}


def mcmc():
    def chain(key):
        x, accepted = np.zeros(2, np.float32), []
        for key_ in jax.random.split(key, 20):
            move, accept = jax.random.split(key_)
            proposal = x + 0.5 * np.asarray(jax.random.normal(move, (2,)))
            ratio = -0.5 * (((proposal - 1) ** 2).sum() - ((x - 1) ** 2).sum())
            accepted.append(np.log(jax.random.uniform(accept)) < ratio)
            x = proposal if accepted[-1] else x
        return x, np.mean(accepted)

    found = [chain(k) for k in jax.random.split(jax.random.PRNGKey(6), 16)]
    samples = np.stack([x for x, _ in found])
    return {"samples": samples, "rates": [r for _, r in found], "mean": samples.mean(0)}


def generation():
    embedding = np.random.default_rng(7).normal(size=(16, 8)).astype(np.float32)
    token = np.arange(8)
    tokens = []
    for _ in range(5):
        logits = embedding[token] @ embedding.T
        logits[np.arange(8), token] = -np.inf
        token = logits.argmax(-1)
        tokens.append(token)
    scores = embedding[token].sum(-1)
    return {"tokens": np.stack(tokens, 1), "scores": scores, "is_array": 1, "compiled": 1}


def shampoo():
    data = np.random.default_rng(8)
    w = data.normal(size=(3, 2)).astype(np.float32)
    statistics = np.stack([np.eye(3)] * 8)
    for _ in range(2):
        batch = data.normal(size=(8, 4, 3)).astype(np.float32)
        grads = np.stack([b.T @ (b @ w) / 4 for b in batch])
        own = grads @ grads.transpose(0, 2, 1)
        shared = np.repeat([own[:4].sum(0), own[4:].sum(0)], 4, axis=0)
        statistics = 0.9 * statistics + 0.1 * shared
        values, vectors = np.linalg.eigh(statistics + 1e-3 * np.eye(3))
        roots = (vectors * values[:, None] ** -0.25) @ vectors.transpose(0, 2, 1)
        w = w - 0.1 * (roots @ grads.mean(0)).mean(0)
    return {"w": w, "statistics": statistics}


def kfac():
    data = np.random.default_rng(9)
    w, factor, alone = np.arange(3.0), np.eye(3), None
    for _ in range(2):
        batch = data.normal(size=(8, 4, 3)).astype(np.float32).reshape(-1, 3)
        alone = _kfac_step(np.arange(3.0), np.eye(3), batch)[0]
        w, factor = _kfac_step(w, factor, batch)
    return {"w": w, "factor": factor, "alone": alone}


def _kfac_step(w, factor, batch):
    gradient = 2 * batch.T @ (batch @ w) / 32
    factor = 0.5 * factor + 0.5 * batch.T @ batch / 32
    return w - np.linalg.solve(factor + 0.1 * np.eye(3), gradient), factor


def cookbook():
    x = np.arange(1, 9, dtype=np.float32).reshape(2, 4)
    a = np.arange(32, dtype=np.float32).reshape(2, 4, 2, 2)
    return {
        "rows": x / x.sum(0, keepdims=True),
        "cols": x / x.sum(1, keepdims=True),
        "both": x / x.sum(),
        "total": (a @ a.transpose(0, 1, 3, 2)).sum(),
    }


def language_model():
    data = np.random.default_rng(10)
    optimizer = optax.adam(0.05, eps=1e-2)
    table = jnp.zeros((8, 8))
    opt_state = optimizer.init(table)
    trace = []
    for step in range(4):
        tokens = data.integers(0, 8, size=(16, 6))

        def loss_fn(table, tokens=tokens):
            logp = jax.nn.log_softmax(table)
            return -logp[tokens[:, :-1], tokens[:, 1:]].mean()

        loss, grads = jax.value_and_grad(loss_fn)(table)
        updates, opt_state = optimizer.update(grads, opt_state)
        table = optax.apply_updates(table, updates)
        trace += [float(loss)] if step % 2 == 0 else []
    return {"table": table, "losses": trace, "backend": len(jax.default_backend())}
