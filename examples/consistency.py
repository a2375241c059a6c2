"""A consistency model in a minute on a CPU: training steps by forward-mode derivatives through attention.

    python examples/consistency.py [--steps 400]

The data are ellipses, sequences of points. x(t) = cos(t) data + sin(t) noise leads from a curve, t = 0, to noise, t =
pi / 2. A consistency function f(x, t) = cos(t) x - sin(t) F(x, t) takes x(t) to the curve in one step, so along the path of
the probability flow its derivative is zero. Training needs that derivative, and with it

    dF/dt = (dF/dx) dx/dt + (dF/dt at fixed x)

which is one Jacobian-vector product of the network: torch.func.jvp, through attention in memory linear in the sequence.
"""

import argparse

import torch
from flash_attention import attention

POINTS, WIDTH, HEADS = 16, 32, 2


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = torch.nn.LayerNorm(WIDTH)
        self.qkv = torch.nn.Linear(WIDTH, 3 * WIDTH)
        self.mix = torch.nn.Linear(WIDTH, WIDTH)
        self.feed = torch.nn.Sequential(
            torch.nn.LayerNorm(WIDTH), torch.nn.Linear(WIDTH, 4 * WIDTH), torch.nn.GELU(), torch.nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, h):
        q, k, v = self.qkv(self.norm(h)).unflatten(-1, (3, HEADS, WIDTH // HEADS)).unbind(-3)
        h = h + self.mix(attention(q, k, v).flatten(-2))
        return h + self.feed(h)


class Network(torch.nn.Module):
    """F(x, t) of x [batch, points, 2] and t [batch]."""

    def __init__(self):
        super().__init__()
        self.inward = torch.nn.Linear(2 + 4, WIDTH)
        self.place = torch.nn.Parameter(0.1 * torch.randn(POINTS, WIDTH))
        self.blocks = torch.nn.Sequential(Block(), Block())
        self.outward = torch.nn.Linear(WIDTH, 2)

    def forward(self, x, t):
        time = torch.stack([t.sin(), t.cos(), (2 * t).sin(), (2 * t).cos()], -1)[:, None].expand(-1, POINTS, -1)
        return self.outward(self.blocks(self.inward(torch.cat([x, time], -1)) + self.place))


def ellipses(count):
    angle = torch.linspace(0, 2 * torch.pi, POINTS + 1)[:-1] + 2 * torch.pi * torch.rand(count, 1)
    size, turn = 0.8 + 0.8 * torch.rand(count, 2, 1), 2 * torch.pi * torch.rand(count, 1)
    x, y = size[:, 0] * angle.cos(), size[:, 1] * angle.sin()
    return torch.stack([x * turn.cos() - y * turn.sin(), x * turn.sin() + y * turn.cos()], -1)


def loss_of(network, data, share):
    """`share`, from 0 to 1: how much of the tangent counts. It grows: the first ones are of an untrained network."""
    t = torch.atan(torch.exp(1.2 * torch.randn(len(data)) - 0.4))
    cos, sin = t.cos()[:, None, None], t.sin()[:, None, None]
    noise = torch.randn_like(data)
    x, velocity = cos * data + sin * noise, cos * noise - sin * data
    with torch.no_grad():
        along = (t.cos() * t.sin())[:, None, None]
        value, tangent = torch.func.jvp(network, (x, t), (along * velocity, t.cos() * t.sin()))
        step = -cos.square() * (value - velocity) - share * (along * x + tangent)
        step = step / (step.square().mean((1, 2), keepdim=True).sqrt() + 0.1)
    return (network(x, t) - value - step).square().mean()


def noise_left(network, data, t=0.7):
    """Of one step of the model: its distance from the data, relative to that of x(t)."""
    times = torch.full((len(data),), t)
    cos, sin = times.cos()[:, None, None], times.sin()[:, None, None]
    x = cos * data + sin * torch.randn_like(data)
    with torch.no_grad():
        found = cos * x - sin * network(x, times)
    return float((found - data).square().mean().sqrt() / (x - data).square().mean().sqrt())


def train(steps, report=print):
    """What is left of the noise before and after."""
    torch.manual_seed(0)
    network, test = Network(), ellipses(256)
    optimizer = torch.optim.Adam(network.parameters(), lr=2e-3)
    before = noise_left(network, test)
    for step in range(steps):
        optimizer.zero_grad()
        loss_of(network, ellipses(64), min(1.0, step / 200)).backward()
        torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()
        if step % 50 == 49:
            report(f"step {step + 1}: noise left {noise_left(network, test):.3f}")
    return before, noise_left(network, test)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=400)
    steps = parser.parse_args().steps
    before, after = train(steps)
    print(f"noise left after one step of the model: {before:.3f} before training, {after:.3f} after {steps} steps")


if __name__ == "__main__":
    main()
