"""What a TPU's compiler does otherwise: products in parts, and arrays in its registers and beside its cores."""

from .filters import LANES as LANES
from .filters import RELAYOUT as RELAYOUT
from .filters import WIDE as WIDE
from .filters import Cut as Cut
from .filters import groups_of as groups_of
from .filters import is_filter_gradient as is_filter_gradient
from .filters import is_in_parts as is_in_parts
from .filters import is_rarely_used as is_rarely_used
from .filters import labels_of as labels_of
from .filters import splits_features as splits_features
from .filters import taps_of as taps_of
from .lanes import filled as filled
from .lanes import heads_of as heads_of
from .lanes import padded as padded
from .vector import LEFT as LEFT
from .vector import VECTOR as VECTOR
from .vector import nearby as nearby
from .vector import outside as outside
from .windows import PRODUCTS as PRODUCTS
from .windows import RINGS as RINGS
from .windows import filters_last as filters_last
from .windows import mark_windows as mark_windows
from .windows import relaid as relaid
from .windows import sums_last as sums_last
