"""Asked of an installed wheel, outside of any checkout: the numbers of a straight line, by hand."""

import torch

import whence

x = torch.tensor([[1.0], [2.0], [4.0]], dtype=torch.float64)
y = torch.tensor([[1.0], [3.0], [3.0]], dtype=torch.float64)
line = torch.nn.Linear(1, 1, bias=False, dtype=torch.float64)
torch.nn.init.constant_(line.weight, float((x * y).sum() / x.square().sum()))
u = whence.fit(line, [(x, y)], ridge=0.0, progress=False).predict(x[:1])
residual = y - line(x).detach()
hat = x.square() / x.square().sum()
wanted = float((x * residual / (1 - hat)).square().sum() / x.square().sum() ** 2)
assert abs(float(u.hec3) / wanted - 1) < 1e-12, (float(u.hec3), wanted)
place = whence.__file__.rsplit("site-packages", 1)[-1]
print(f"whence {whence.__version__} from {place}: HeC3 {float(u.hec3):.6f}, as by hand")
