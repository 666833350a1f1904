from expstore.schema.schema import ARROW as ARROW
from expstore.schema.schema import DTYPES as DTYPES
from expstore.schema.schema import OBJECT as OBJECT
from expstore.schema.schema import Field as Field
from expstore.schema.schema import Schema as Schema
from expstore.schema.schema import arrow_dtype as arrow_dtype
