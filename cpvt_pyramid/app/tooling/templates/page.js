// A click on the head of a column sorts its table.
for (const head of document.querySelectorAll('th')) {
  head.onclick = () => {
    const column = head.cellIndex;
    const descending = head.dataset.descending !== 'yes';
    const key = (row) => {
      const text = row.cells[column].textContent;
      const number = parseFloat(text);
      return isNaN(number) ? text : number;
    };
    const body = head.closest('table').tBodies[0];
    const rows = [...body.rows].sort((a, b) => {
      const order = key(a) > key(b) ? 1 : key(a) < key(b) ? -1 : 0;
      return descending ? -order : order;
    });
    head.dataset.descending = descending ? 'yes' : 'no';
    body.append(...rows);
  };
}
