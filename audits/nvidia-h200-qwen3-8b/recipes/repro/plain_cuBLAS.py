# plain cuBLAS, dX at N = 151936, K = 4096: 7 rows in one call, and among 8192.
# Written by bi_kernels' audit of recipes; needs torch alone.
import torch


def cancel(x: torch.Tensor, shared: bool = False) -> None:
    """Makes sums over the last dimension grow and then vanish, in place: see `draw`."""
    half = x.shape[-1] // 2
    if shared:
        x[..., half : 2 * half] = x[..., :half]
    else:
        x[..., 7::8] *= 2.0**-12
        kept = (torch.arange(2 * half, device=x.device).view(2, half) % 8 != 7).all(0)
        x[..., half : 2 * half] = torch.where(kept, -x[..., :half], x[..., half : 2 * half])


def numbers(m, n, k, dtype, device, seed):
    """Draws x (m, k), w (n, k) and dy (m, n), whose sums over k and over n grow and then vanish."""
    g = torch.Generator(device).manual_seed(seed)
    draw = lambda *shape: torch.randn(shape, generator=g, device=device)
    w = draw(n, k)
    cancel(w, shared=True)
    cancel(w.t(), shared=True)
    w = w.to(dtype)
    x = draw(m, k)
    cancel(x)
    x = x.to(dtype)
    dy = draw(m, n)
    cancel(dy)
    return x, w, dy.to(dtype)


def gradient(linear, x, w, dy):
    x = x.detach().requires_grad_()
    return torch.autograd.grad(linear(x, w), x, dy)[0]

linear = torch.nn.functional.linear
x, w, dy = numbers(8192, 151936, 4096, torch.bfloat16, "cuda", 0)
alone, among = gradient(linear, x[:7], w, dy[:7]), gradient(linear, x, w, dy)[:7]
differ = alone.view(torch.int16) != among.view(torch.int16)  # in raw bits
print(f"{int(differ.sum())} of {differ.numel()} elements differ")
raise SystemExit(bool(differ.any()))
