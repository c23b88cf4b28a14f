#include "base/number.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

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

int ocp_parse_flag(const char *text) {
  static const struct {
    const char *word;
    int value;
  } words[] = {{"1", 1}, {"true", 1}, {"yes", 1}, {"on", 1}, {"0", 0}, {"false", 0}, {"no", 0}, {"off", 0}};
  const char *const space = " \t\r\n\v\f";
  text += strspn(text, space);
  const size_t length = strcspn(text, space);
  if (text[length + strspn(text + length, space)])
    return -1;
  for (size_t i = 0; i < sizeof words / sizeof *words; i++)
    if (strlen(words[i].word) == length && strncasecmp(text, words[i].word, length) == 0)
      return words[i].value;
  return -1;
}
