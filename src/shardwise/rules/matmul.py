"""Matrix products."""

from .registry import register_table

register_table(
    {
        "aten::mm": "m k, k n -> m n ; linear 0 | 1",
        "aten::bmm": "b m k, b k n -> b m n ; linear 0 | 1",
        "aten::mv": "m k, k -> m ; linear 0 | 1",
        "aten::dot": "k, k -> ; linear 0 | 1",
        "aten::vdot": "k, k -> ; linear 0 | 1",
        "aten::addmm": "m? n?, m k, k n -> m n ; linear 0+1 | 0+2",
        "aten::addmv": "m?, m k, k -> m ; linear 0+1 | 0+2",
        "aten::addbmm": "m? n?, b m k, b k n -> m n ; linear 0+1 | 0+2",
        "aten::baddbmm": "b? m? n?, b m k, b k n -> b m n ; linear 0+1 | 0+2",
        "aten::linear": "x.. k, n k, n -> x.. n ; linear 0+2 | 1+2",
    }
)
