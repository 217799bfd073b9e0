"""The program of a pmap-era tutorial, word for word between the two marks.

Only what the tutorial leaves undefined is added: `functools`, `loss_fn`, `learning_rate`, the
data loader and the number of epochs. On today's JAX it runs under `python -m compat run`.
"""
# ruff: noqa
import functools

learning_rate = 0.1
num_epochs = 3


def loss_fn(params, xs, ys):
    return jnp.mean((xs * params["weight"] + params["bias"] - ys) ** 2)


# --- word for word from here ---
import jax
import jax.numpy as jnp
import numpy as np
from jax import grad, jit, vmap, pmap

# 设置TPU环境（在Colab中）
import jax.tools.colab_tpu
jax.tools.colab_tpu.setup_tpu()

# 检测可用设备
devices = jax.devices()
n_devices = jax.local_device_count()
print(f'可用的设备数量: {n_devices}')
print(f'设备列表: {devices}')

# 准备训练数据
batch_size = 128
n_devices = jax.local_device_count()

# 创建分片数据
xs = np.random.normal(size=(n_devices, batch_size, 1))
ys = xs * 2 + 1  # 简单线性关系

# 初始化模型参数
def init_params(rng):
    weights_key, bias_key = jax.random.split(rng)
    weight = jax.random.normal(weights_key, ())
    bias = jax.random.normal(bias_key, ())
    return {'weight': weight, 'bias': bias}

@functools.partial(jax.pmap, axis_name='batch')
def update(params, xs, ys):
    # 计算损失和梯度
    loss, grads = jax.value_and_grad(loss_fn)(params, xs, ys)
    
    # 跨设备同步梯度
    grads = jax.lax.pmean(grads, axis_name='batch')
    loss = jax.lax.pmean(loss, axis_name='batch')
    
    # 更新参数
    new_params = jax.tree_multimap(
        lambda param, g: param - g * learning_rate, 
        params, grads
    )
    
    return new_params, loss

def train_epoch(params, data_loader):
    total_loss = 0
    for batch_idx, (xs, ys) in enumerate(data_loader):
        # 分片数据到各个设备
        xs_sharded = jax.device_put_sharded(
            [xs[i] for i in range(n_devices)], 
            devices
        )
        ys_sharded = jax.device_put_sharded(
            [ys[i] for i in range(n_devices)], 
            devices
        )
        
        # 执行并行更新
        params, loss = update(params, xs_sharded, ys_sharded)
        total_loss += loss.mean()
        
        # 每100个batch打印进度
        if batch_idx % 100 == 0:
            print(f'Batch {batch_idx}, Loss: {loss.mean():.4f}')
    
    return params, total_loss / (batch_idx + 1)

# --- added: the names that the next lines use ---
rng_key = jax.random.PRNGKey(0)
data_loader = [(xs, ys)] * 101
# --- word for word again ---

# 初始化模型参数
params = init_params(rng_key)

# 复制参数到所有设备
params_replicated = jax.device_put_replicated(params, devices)

# 分布式训练循环
for epoch in range(num_epochs):
    params_replicated, avg_loss = train_epoch(params_replicated, data_loader)
    print(f'Epoch {epoch}, Average Loss: {avg_loss:.4f}')
# --- to here ---
print("weight", params_replicated["weight"][0], "bias", params_replicated["bias"][0])
