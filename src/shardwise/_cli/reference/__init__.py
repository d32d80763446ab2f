"""Commands that look things up or teach."""

from . import chips as chips
from . import doctor as doctor
from . import explain as explain
from . import learn as learn
from . import models as models
