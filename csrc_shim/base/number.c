#include "base/number.h"

#include <errno.h>
#include <stdlib.h>

bool ocp_parse_number(const char *text, uint64_t largest, uint64_t *value) {
  char *end = NULL;
  errno = 0;
  if (*text < '0' || *text > '9')
    return false;
  const unsigned long long number = strtoull(text, &end, 10);
  int shift = 0;
  if (*end == 'K' || *end == 'k')
    shift = 10;
  else if (*end == 'M' || *end == 'm')
    shift = 20;
  else if (*end == 'G' || *end == 'g')
    shift = 30;
  end += shift > 0;
  if (*end || errno || number > largest >> shift)
    return false;
  *value = number << shift;
  return true;
}
